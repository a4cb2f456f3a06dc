#include <sys/resource.h>
int main(void) {
  struct rlimit r = {1, 1};
  setrlimit(RLIMIT_CPU, &r);
  for (volatile unsigned i = 0;; i++) {
  }
}
