#include <sys/reboot.h>
int main(void) { return reboot(RB_AUTOBOOT) == 0; }
