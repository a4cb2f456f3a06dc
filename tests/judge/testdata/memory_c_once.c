#include <stdlib.h>
#include <string.h>
int main(void) {
  char* volatile p = malloc(10ul << 30);
  if (!p) return 7;
  memset(p, 1, 10ul << 30);
  return p[5] - 1;
}
