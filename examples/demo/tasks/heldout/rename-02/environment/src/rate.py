path = 17
