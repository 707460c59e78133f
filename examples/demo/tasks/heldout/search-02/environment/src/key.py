cache = "red"
