rate = 72
