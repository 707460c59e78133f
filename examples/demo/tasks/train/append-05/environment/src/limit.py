mode = 10
