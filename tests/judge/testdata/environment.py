import os
extra = set(os.environ) - {"PATH", "HOME", "LANG", "PWD", "TMPDIR", "USER", "LOGNAME", "SHELL", "LC_CTYPE", "TERM", "TZ", "MINE"}
print(sorted(extra), os.environ["MINE"])
