node = wind
