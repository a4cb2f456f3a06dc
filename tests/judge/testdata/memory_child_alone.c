#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  if (fork() == 0) {
    volatile char* p = malloc(1ul << 30);
    for (unsigned long i = 0; i < 1ul << 30; i += 4096) p[i] = 1;
    _exit(0);
  }
  wait(0);
  return 0;
}
