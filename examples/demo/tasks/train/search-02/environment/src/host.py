token = zinc
