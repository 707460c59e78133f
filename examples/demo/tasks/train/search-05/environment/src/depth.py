plan = "pine"
