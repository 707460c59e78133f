task = 16
