#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>
int main(void) {
  mkdir("x", 0700);
  if (chroot("x")) return 0;
  for (int i = 0; i < 64; i++) {
    if (chdir("..")) break;
  }
  if (chroot(".")) return 0;
  return access("/var/lib/dsec", F_OK) == 0;
}
