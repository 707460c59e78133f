task = 88
rate = 66
