n = 0
try:
    while n < 64:
        with open(f"f{n}", "wb") as file:
            file.write(b"x" * (1 << 20))
        n += 1
except OSError:
    pass
print(0 < n < 16)
