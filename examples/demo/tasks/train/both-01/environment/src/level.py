rate = 45
