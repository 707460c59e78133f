task = 13
