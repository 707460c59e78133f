depth = 20
