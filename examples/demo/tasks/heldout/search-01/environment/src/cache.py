port = rain
