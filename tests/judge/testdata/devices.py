import os, stat
bad = []
for name in sorted(os.listdir("/dev")):
    mode = os.lstat(f"/dev/{name}").st_mode
    if stat.S_ISBLK(mode):
        bad.append(name)
print(bad)
