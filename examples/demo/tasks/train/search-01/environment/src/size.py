port = "blue"
