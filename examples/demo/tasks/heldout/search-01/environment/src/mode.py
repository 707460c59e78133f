limit = "green"
