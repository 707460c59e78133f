path = 44
