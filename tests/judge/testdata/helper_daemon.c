#include <stdio.h>
#include <unistd.h>
int main(void) {
  if (fork() == 0) {
    setsid();
    if (fork() == 0) {
      sleep(1);
      puts("late");
      fflush(stdout);
      _exit(0);
    }
    _exit(0);
  }
  puts("early");
  return 0;
}
