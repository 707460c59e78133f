state = wind
