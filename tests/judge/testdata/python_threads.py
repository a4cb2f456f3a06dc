import threading
out = []
ts = [threading.Thread(target=out.append, args=(i,)) for i in range(20)]
for t in ts:
    t.start()
for t in ts:
    t.join()
print(sorted(out) == list(range(20)))
