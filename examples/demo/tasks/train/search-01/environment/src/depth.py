mode = iron
