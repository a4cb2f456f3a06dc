#include <errno.h>
#include <signal.h>
#include <unistd.h>
int main(void) {
  int done = kill(getppid(), SIGKILL);
  return done == 0 && getppid() > 1 ? 1 : 0;
}
