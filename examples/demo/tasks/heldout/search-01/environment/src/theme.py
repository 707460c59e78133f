node = 31
