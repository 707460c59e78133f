title = wolf
