#define _GNU_SOURCE
#include <sched.h>
#include <sys/mount.h>
int main(void) {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) return 0;
  return mount("none", "/tmp", "tmpfs", 0, "") == 0 && umount2("/proc", MNT_DETACH) == 0;
}
