title = "wolf"
