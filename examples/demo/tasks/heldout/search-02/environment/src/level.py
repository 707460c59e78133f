index = "bear"
