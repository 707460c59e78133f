cache = red
