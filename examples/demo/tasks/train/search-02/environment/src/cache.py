page = "green"
