#include <unistd.h>
int main(void) { return write(1, "a\0b\0", 4) != 4; }
