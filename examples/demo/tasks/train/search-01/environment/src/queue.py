task = 31
