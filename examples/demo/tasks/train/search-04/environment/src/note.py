cache = "fox"
