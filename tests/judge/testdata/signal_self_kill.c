#include <signal.h>
int main(void) { return raise(9); }
