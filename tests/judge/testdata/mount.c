#include <sched.h>
#include <sys/mount.h>
int main(void) {
  return mount("none", "/tmp", "tmpfs", 0, "") == 0 || umount2("/proc", MNT_DETACH) == 0;
}
