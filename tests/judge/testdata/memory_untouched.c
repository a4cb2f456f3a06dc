#include <stdio.h>
#include <sys/mman.h>
int main(void) {
  char* p = mmap(0, 10ul << 30, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 1;
  p[5ul << 30] = 1;
  puts("mapped");
  return 0;
}
