size = 91
