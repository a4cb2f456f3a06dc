import sys
assert sys.stdin.read() == ""
print("end")
