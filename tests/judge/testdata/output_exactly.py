import sys
sys.stdout.write("x" * 65536)
