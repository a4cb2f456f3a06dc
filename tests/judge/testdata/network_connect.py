import socket
s = socket.socket()
s.settimeout(2)
try:
    s.connect(("1.1.1.1", 80))
    print("connected")
except OSError:
    print("refused")
