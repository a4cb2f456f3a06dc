// SPDX-License-Identifier: Apache-2.0
#include "aether/pty.h"

#include <fcntl.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>

#include "aether/fs_identity.h"
#include "os/syscalls.h"

namespace dsec::aether {

Result<Pty> OpenPty(int root, const Identity& identity, uint32_t rows, uint32_t cols) {
  Pty pty;
  {
    // devpts gives the slave to whoever opens ptmx. /dev is the sandbox's read-only template, so
    // this cannot block.
    ScopedFsIdentity as(identity.uid, identity.gid);
    pty.master.Reset(os::OpenAt2(root, "dev/pts/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC,
                                 0, RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS));
    if (!pty.master.valid()) return Error::FromErrno(errno, "exec.tty", "open /dev/pts/ptmx");
  }
  int unlocked = 0;
  if (::ioctl(pty.master.get(), TIOCSPTLCK, &unlocked) != 0) {
    return Error::FromErrno(errno, "exec.tty", "unlock the terminal");
  }
  pty.slave.Reset(::ioctl(pty.master.get(), TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!pty.slave.valid()) return Error::FromErrno(errno, "exec.tty", "open the terminal");
  DSEC_TRY_VOID(ResizePty(pty.master.get(), rows == 0 ? 24 : rows, cols == 0 ? 80 : cols));
  return pty;
}

Result<void> ResizePty(int master, uint32_t rows, uint32_t cols) {
  winsize size = {};
  size.ws_row = static_cast<uint16_t>(std::min(rows, 65535u));
  size.ws_col = static_cast<uint16_t>(std::min(cols, 65535u));
  if (::ioctl(master, TIOCSWINSZ, &size) != 0) {
    return Error::FromErrno(errno, "exec.tty", "set the terminal's size");
  }
  return Ok();
}

}  // namespace dsec::aether
