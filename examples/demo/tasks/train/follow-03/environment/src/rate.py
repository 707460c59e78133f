page = 25
