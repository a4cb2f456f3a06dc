#include <unistd.h>
int main(void) { return nice(-10) == -10 ? 1 : 0; }
