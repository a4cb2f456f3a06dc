#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
  int fd = memfd_create("x", 0);
  if (ftruncate(fd, 1 << 30)) return 7;
  char* p = mmap(0, 1 << 30, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  memset(p, 1, 1 << 30);
  return 0;
}
