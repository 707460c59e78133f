index = 24
