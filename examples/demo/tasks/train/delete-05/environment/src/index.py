index = 87
