#include <signal.h>
int main(void) { return raise(1); }
