import sys, threading
sys.setrecursionlimit(10**9)
threading.stack_size(512 << 20)
def f(n):
    return f(n + 1)
t = threading.Thread(target=f, args=(0,))
t.start()
t.join()
