list = 71
