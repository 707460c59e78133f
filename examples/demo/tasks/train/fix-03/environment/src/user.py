plan = 32
port = 74
