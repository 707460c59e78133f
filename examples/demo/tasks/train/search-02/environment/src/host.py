token = "zinc"
