#include <stdlib.h>
#include <string.h>
int main(void) {
  for (int i = 0; i < 10240; i++) {
    char* volatile p = malloc(1 << 20);
    if (!p) return 7;
    memset(p, i + 1, 1 << 20);
  }
  return 0;
}
