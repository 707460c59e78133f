size = 94
