import socket
a = socket.socket()
a.bind(("127.0.0.1", 0))
a.listen()
b = socket.create_connection(a.getsockname())
c, _ = a.accept()
b.sendall(b"x")
print(c.recv(1))
