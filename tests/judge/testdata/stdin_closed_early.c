#include <unistd.h>
int main(void) {
  close(0);
  return write(1, "ok", 2) != 2;
}
