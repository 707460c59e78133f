node = "salt"
