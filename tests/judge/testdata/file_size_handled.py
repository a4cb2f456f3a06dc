import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open("big", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)
except OSError as error:
    print(error.errno)
