import sys
sys.stdout.write("x" * (1 << 20))
