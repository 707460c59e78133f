index = bear
