rate = wind
