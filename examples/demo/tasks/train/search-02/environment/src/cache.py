page = green
