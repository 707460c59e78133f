plan = 91
