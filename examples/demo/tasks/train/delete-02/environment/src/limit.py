key = 29
