key = bear
