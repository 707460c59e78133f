plan = 76
