size = 66
