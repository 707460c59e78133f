port = "rain"
