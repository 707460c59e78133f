key = "bear"
