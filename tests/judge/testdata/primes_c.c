#include <stdio.h>
#include <string.h>
int main(void) {
  static char composite[2000001];
  int count = 0;
  for (int i = 2; i <= 2000000; i++) {
    if (composite[i]) continue;
    count++;
    for (long j = (long)i * i; j <= 2000000; j += i) composite[j] = 1;
  }
  printf("%d\n", count);
  return 0;
}
