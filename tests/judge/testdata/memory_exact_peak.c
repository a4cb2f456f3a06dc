#include <stdlib.h>
#include <string.h>
int main(void) {
  char* volatile p = malloc(32 << 20);
  memset(p, 1, 32 << 20);
  return p[7] - 1;
}
