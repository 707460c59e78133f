note = zinc
