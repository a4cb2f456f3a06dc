// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "os/fd_passing.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {

using os::UniqueFd;

int WriteIdMaps(pid_t pid, const char* map) {
  for (const char* file : {"uid_map", "gid_map"}) {
    char path[48];
    std::snprintf(path, sizeof(path), "/proc/%d/%s", pid, file);
    int error = WriteExisting(AT_FDCWD, path, map, std::strlen(map));
    if (error != 0) return error;
  }
  return 0;
}

bool SendGo(int socket) { return os::SendPacketRaw(socket, "g", 1, nullptr, 0, 0) == 0; }
void AwaitGo(int socket) {
  char go = 0;
  size_t none = 0;
  if (os::ReceivePacketRaw(socket, &go, 1, nullptr, &none, 0) != 1) ::_exit(1);
}

int BecomeRootOfA() {
  if (::setgroups(0, nullptr) != 0 || ::setresgid(0, 0, 0) != 0 || ::setresuid(0, 0, 0) != 0)
    return -errno;
  // The change of ids has closed our /proc files to ourselves; init's maps are written through
  // them. Nothing that could abuse it is in A yet.
  if (::prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) != 0) return -errno;
  // It stays in the spawner's session, which has no terminal: setsid(2) makes a scheduling group
  // (autogroup), behind which the caller queues anew, a whole tick on a busy host.
  ::umask(022);
  return 0;
}

int CoverProc() {
  UniqueFd proc;
  int error = NewFileSystem("proc", {}, kDataAttributes, &proc);
  if (error != 0) return error;
  return ::move_mount(proc.get(), "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) == 0 ? 0 : -errno;
}

// The network namespace belongs to A, so root of B has no capability over it: ports below 1024 and
// unprivileged ping (within the ids of B) are opened by its own sysctls.
int ConfigureNetwork() {
  UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return -errno;
  ifreq request = {};
  std::strcpy(request.ifr_name, "lo");
  request.ifr_flags = IFF_UP | IFF_RUNNING;
  if (::ioctl(socket.get(), SIOCSIFFLAGS, &request) != 0) return -errno;
  int error = WriteExisting(AT_FDCWD, "/proc/sys/net/ipv4/ip_unprivileged_port_start", "0", 1);
  if (error != 0) return error;
  return WriteExisting(AT_FDCWD, "/proc/sys/net/ipv4/ping_group_range", "1 65536", 7);
}

int AwaitReply(int socket, uint64_t deadline, wire::Reply* reply, int* fds, size_t* fd_count) {
  int ready = WaitReadable(socket, deadline);
  if (ready < 0) return ready;
  if (ready == 0) return -ETIMEDOUT;
  ssize_t size = os::ReceivePacketRaw(socket, reply, sizeof(*reply), fds, fd_count, 0);
  if (size == 0) return -EPIPE;
  if (size < 0) return static_cast<int>(size);
  return static_cast<size_t>(size) == sizeof(*reply) ? 0 : -EBADMSG;
}

int OpenUserNamespace(int pidfd, pid_t pid) {
  int fd = ::ioctl(pidfd, os::kPidFdGetUserNamespace, 0);
  if (fd >= 0 || (errno != ENOTTY && errno != EINVAL && errno != EOPNOTSUPP))
    return fd >= 0 ? fd : -errno;
  char path[48];  // before Linux 6.11
  std::snprintf(path, sizeof(path), "/proc/%d/ns/user", pid);
  fd = ::open(path, O_RDONLY | O_CLOEXEC);
  return fd >= 0 ? fd : -errno;
}

int MapDevTemplate(int user_ns, UniqueFd* mount) {
  mount->Reset(::open_tree(AT_FDCWD, kDevTemplate, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC));
  if (!mount->valid()) return -errno;
  mount_attr attributes = {};
  attributes.attr_set =
      MOUNT_ATTR_IDMAP | MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC;
  attributes.userns_fd = static_cast<uint64_t>(user_ns);
  return ::mount_setattr(mount->get(), "", AT_EMPTY_PATH, &attributes, sizeof(attributes)) == 0
             ? 0
             : -errno;
}

// init keeps the agent's uid as its real, effective and saved uid: a number that does not exist in
// B, so that no process inside is its peer when it comes to prlimit(2), ptrace(2), scheduling or
// signals, root included. It acts on files as root of B. Needs the map of B.
int TakeIdentity() {
  ::setfsgid(0);
  ::setfsuid(0);
  if (::setfsuid(0) != 0 || ::setfsgid(0) != 0) return -EPERM;
  // Hides maps, environ, fd, cwd, root and exe of /proc/1, and refuses ptrace to all but root of
  // the host's namespace.
  return ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0 ? 0 : -errno;
}

void Rename(const Shared& shared, const char* name) {
  std::memset(shared.argv0, 0, shared.argv0_size);
  std::snprintf(shared.argv0, shared.argv0_size, "%s", name);
  ::prctl(PR_SET_NAME, name, 0, 0, 0);
}

}  // namespace dsec::spawn::stage
