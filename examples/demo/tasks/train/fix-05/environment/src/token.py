rate = 12
index = 97
