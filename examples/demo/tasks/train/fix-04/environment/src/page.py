note = 10
key = 55
