import collections, sys
for word, n in sorted(collections.Counter(sys.stdin.read().split()).items()):
    print(word, n)
