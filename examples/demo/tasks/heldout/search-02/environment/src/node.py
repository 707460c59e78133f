node = salt
