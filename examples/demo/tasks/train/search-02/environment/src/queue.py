theme = 76
