level = "red"
