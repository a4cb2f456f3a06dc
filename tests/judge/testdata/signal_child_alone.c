#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
  if (fork() == 0) abort();
  int status;
  wait(&status);
  return WIFSIGNALED(status) && WTERMSIG(status) == 6 ? 0 : 1;
}
