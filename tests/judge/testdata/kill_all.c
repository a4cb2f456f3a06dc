#include <signal.h>
#include <unistd.h>
int main(void) {
  kill(-1, SIGKILL);
  return write(1, "alive", 5) != 5;
}
