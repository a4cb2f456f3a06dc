#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  for (int i = 0; i < 20; i++) {
    if (fork() == 0) {
      char* volatile p = malloc(8 << 20);
      memset(p, 1, 8 << 20);
      sleep(60);
    }
  }
  while (wait(0) > 0) {
  }
  return 0;
}
