cache = fox
