#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  if (fork() == 0) {
    for (volatile unsigned i = 0;; i++) {
    }
  }
  return wait(0) < 0;
}
