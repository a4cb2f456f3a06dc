import sys
sys.stdout.buffer.write(b"a\r\nb\r\n")
