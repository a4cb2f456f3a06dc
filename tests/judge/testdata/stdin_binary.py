import sys
d = sys.stdin.buffer.read()
print(len(d), d[0], d[-1])
