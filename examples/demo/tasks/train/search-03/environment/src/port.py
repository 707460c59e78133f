node = rain
