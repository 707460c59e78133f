queue = 54
