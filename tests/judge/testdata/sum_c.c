#include <stdio.h>
int main(void) {
  int n;
  long sum = 0, x;
  if (scanf("%d", &n) != 1) return 2;
  for (int i = 0; i < n; i++) {
    if (scanf("%ld", &x) != 1) return 3;
    sum += x;
  }
  printf("%ld\n", sum);
  return 0;
}
