while True:
    print("flood" * 100)
