#include <unistd.h>
int main(void) { return write(1, "\xff\xfe\x80", 3) != 3; }
