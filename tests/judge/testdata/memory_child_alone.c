#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  if (fork() == 0) {
    char* volatile p = malloc(1ul << 30);
    memset(p, 1, 1ul << 30);
    _exit(0);
  }
  wait(0);
  return 0;
}
