x = bytearray(100 << 20)
for i in range(0, len(x), 4096):
    x[i] = 1
print(len(x) >> 20)
