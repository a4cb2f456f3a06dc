try:
    x = b"x" * (10 << 30)
except MemoryError:
    pass
print("here")
