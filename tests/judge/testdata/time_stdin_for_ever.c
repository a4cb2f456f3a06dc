#include <unistd.h>
int main(void) {
  char c;
  int p[2];
  if (pipe(p) != 0) return 1;
  while (read(p[0], &c, 1) != 0) {
  }
  return 0;
}
