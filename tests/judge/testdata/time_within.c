#include <time.h>
int main(void) {
  while (clock() < CLOCKS_PER_SEC / 5) {
  }
  return 0;
}
