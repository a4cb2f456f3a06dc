#include <math.h>
#include <stdio.h>
int main(void) {
  printf("%.6f %.6f\n", sqrt(2), sin(1));
  return 0;
}
