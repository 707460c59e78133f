plan = pine
