import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    for name in ("environ", "mem", "maps", "fd", "cwd", "root", "exe", "stack", "auxv", "io"):
        path = f"/proc/{pid}/{name}"
        try:
            if name == "fd":
                os.listdir(path)
            elif name in ("cwd", "root", "exe"):
                os.readlink(path)
            else:
                with open(path, "rb") as file:
                    file.read(64)
        except OSError:
            continue
        print("reached", path)
print("end")
