page = 23
