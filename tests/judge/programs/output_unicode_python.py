print("ü中😀")
