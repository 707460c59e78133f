key = 59
state = 76
