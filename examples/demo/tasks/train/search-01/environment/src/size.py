port = blue
