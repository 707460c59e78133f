title = 68
