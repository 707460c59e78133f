index = 81
