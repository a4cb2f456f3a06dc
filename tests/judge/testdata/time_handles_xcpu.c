#include <signal.h>
static void on(int s) { (void)s; }
int main(void) {
  signal(SIGXCPU, on);
  signal(SIGALRM, on);
  signal(SIGPROF, on);
  for (volatile unsigned i = 0;; i++) {
  }
}
