note = "zinc"
