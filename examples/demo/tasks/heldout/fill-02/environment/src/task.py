rate = 20
