import sys
print(__name__, len(sys.argv), sys.argv[1:])
