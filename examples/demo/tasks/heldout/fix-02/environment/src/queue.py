title = 84
list = 21
