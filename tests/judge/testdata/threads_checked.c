#include <pthread.h>
#include <unistd.h>
static void* wait_for(void* p) {
  pause();
  return p;
}
int main(void) {
  for (int i = 0; i < 100; i++) {
    pthread_t t;
    if (pthread_create(&t, 0, wait_for, 0)) return 9;
  }
  return 0;
}
