#include <fcntl.h>
int main(void) {
  for (int fd = 3; fd < 65536; fd++) {
    if (fcntl(fd, F_GETFD) >= 0) return 1;
  }
  return 0;
}
