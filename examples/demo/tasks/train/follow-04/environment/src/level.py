host = 31
