path = 69
