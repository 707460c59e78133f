state = blue
