import sys
while True:
    sys.stderr.write("flood" * 1000)
