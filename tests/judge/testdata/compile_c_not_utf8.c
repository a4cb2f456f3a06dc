int main(void) { return "\xff"[0] != 0xff - 256; }
