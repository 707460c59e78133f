depth = 17
