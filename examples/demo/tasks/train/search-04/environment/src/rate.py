list = rain
