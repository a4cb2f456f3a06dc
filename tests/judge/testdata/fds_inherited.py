import os
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], max(map(int, os.listdir("/proc/self/fd"))) < 4)
