mode = 20
