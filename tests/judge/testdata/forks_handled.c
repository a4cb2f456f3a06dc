#include <stdio.h>
#include <unistd.h>
int main(void) {
  int n = 0;
  for (;; n++) {
    int p = fork();
    if (p < 0) break;
    if (p == 0) pause();
  }
  puts(n > 5 && n < 16 ? "bounded" : "not bounded");
  return 0;
}
