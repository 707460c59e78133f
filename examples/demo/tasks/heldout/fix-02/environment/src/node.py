port = 28
