state = 15
