theme = 69
