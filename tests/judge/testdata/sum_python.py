import sys
words = sys.stdin.read().split()
print(sum(map(int, words[1:1 + int(words[0])])))
