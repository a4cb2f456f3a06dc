#include <signal.h>
int main(void) { return raise(SIGSTOP); }
