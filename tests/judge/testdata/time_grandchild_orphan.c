#include <unistd.h>
int main(void) {
  if (fork() == 0) {
    if (fork() == 0) {
      setsid();
      for (volatile unsigned i = 0;; i++) {
      }
    }
    _exit(0);
  }
  sleep(60);
}
