#include <stdlib.h>
int main(void) {
  char* volatile p = malloc(8ul << 30);
  return p == 0;
}
