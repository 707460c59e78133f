state = 90
