with open("a", "wb") as file:
    for _ in range(64):
        file.write(b"x" * (1 << 20))
