#include <fcntl.h>
#include <unistd.h>
int main(void) {
  int fd = open("sparse", O_CREAT | O_WRONLY, 0600);
  return ftruncate(fd, 200 << 20);
}
