level = red
