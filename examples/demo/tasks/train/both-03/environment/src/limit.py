queue = 83
