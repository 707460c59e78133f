limit = green
