port = 42
