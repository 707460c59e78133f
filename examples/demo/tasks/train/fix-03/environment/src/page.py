mode = 36
