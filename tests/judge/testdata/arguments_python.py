import sys
print("".join(f"[{a}]" for a in sys.argv[1:]), end="")
