n = 0
try:
    while n < 5000:
        open(f"f{n}", "w").close()
        n += 1
except OSError as error:
    print(error.errno)
