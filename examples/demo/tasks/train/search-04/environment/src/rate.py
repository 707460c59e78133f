list = "rain"
