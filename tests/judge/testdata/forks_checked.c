#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  for (int i = 0; i < 100; i++) {
    int p = fork();
    if (p < 0) return 9;
    if (p == 0) pause();
  }
  return 0;
}
