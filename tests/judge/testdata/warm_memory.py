x = []
while True:
    x.append(bytearray(b"x") * (1 << 20))
