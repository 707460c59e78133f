node = "rain"
