cache = 64
