#include <pthread.h>
static void* burn(void* p) {
  for (volatile unsigned i = 0;; i++) {
  }
}
int main(void) {
  pthread_t t;
  for (int i = 0; i < 4; i++) pthread_create(&t, 0, burn, 0);
  return pthread_join(t, 0);
}
