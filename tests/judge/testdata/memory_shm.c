#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
  int fd = memfd_create("x", 0);
  if (ftruncate(fd, 160 << 20)) return 7;
  char* p = mmap(0, 160 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  memset(p, 1, 160 << 20);
  return 0;
}
