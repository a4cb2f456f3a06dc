#include <string.h>
#include <unistd.h>
#include <fcntl.h>
int main(void) {
  static char b[1 << 16];
  int fd = open("big", O_CREAT | O_WRONLY, 0600);
  for (int i = 0; i < 1024; i++) {
    if (write(fd, b, sizeof b) < 0) return 5;
  }
  return 0;
}
