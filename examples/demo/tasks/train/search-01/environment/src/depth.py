mode = "iron"
