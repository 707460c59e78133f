node = 59
page = 23
