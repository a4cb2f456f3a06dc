print(open("data/in.txt").read(), end="")
