with open("big", "wb") as file:
    for _ in range(50):
        file.write(b"x" * (1 << 20))
import os
print(os.path.getsize("big") >> 20)
