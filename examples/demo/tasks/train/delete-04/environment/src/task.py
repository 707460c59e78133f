cache = 29
