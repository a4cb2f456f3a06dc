print(open("/dev/stdin").read(), end="")
