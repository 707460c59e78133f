state = "wind"
