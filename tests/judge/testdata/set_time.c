#include <sys/time.h>
int main(void) {
  struct timeval t = {1, 0};
  return settimeofday(&t, 0) == 0;
}
