node = "wind"
