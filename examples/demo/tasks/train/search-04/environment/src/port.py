state = "blue"
