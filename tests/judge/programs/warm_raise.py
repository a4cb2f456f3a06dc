raise KeyError("x")
