rate = "wind"
