// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <linux/keyctl.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "os/fd_passing.h"
#include "os/memfd.h"
#include "spawn/stage/run.h"
#include "spawn/stage/stage.h"

namespace dsec::spawn::stage {
namespace {

using wire::Step;

constexpr int kControl = 3;
constexpr size_t kMaxFds = wire::kSlotFixedFds + 3 + wire::kMaxV1;

// The four programs as handed over; the last two are used for as long as there are sandboxes.
alignas(sock_filter) uint8_t filters[4 * wire::kMaxFilterBytes];

int InstallProgram(const uint8_t* bytes, uint32_t size) {
  if (size == 0) return -EINVAL;
  sock_fprog program = {static_cast<unsigned short>(size / sizeof(sock_filter)),
                        reinterpret_cast<sock_filter*>(const_cast<uint8_t*>(bytes))};
  return ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0 ? 0 : -errno;
}

int LoadFilters(const wire::Start& start, int file, Shared& shared) {
  const size_t before_code = start.allow_bytes + start.arguments_bytes;
  const size_t before_zygote = before_code + start.code_bytes;
  const size_t total = before_zygote + start.zygote_bytes;
  if (!os::IsSealed(file) || start.code_bytes == 0 || start.zygote_bytes == 0) return -EINVAL;
  ssize_t n = ::pread(file, filters, total, 0);
  if (n < 0) return -errno;
  if (static_cast<size_t>(n) != total) return -EINVAL;
  const auto program = [](size_t at, uint32_t bytes) {
    return sock_fprog{static_cast<uint16_t>(bytes / sizeof(sock_filter)),
                      reinterpret_cast<sock_filter*>(filters + at)};
  };
  shared.code_filter = program(before_code, start.code_bytes);
  shared.zygote_filter = program(before_zygote, start.zygote_bytes);
  // Every process that comes from here shares these two; only a short third one is installed for
  // each exec. The kernel translates a program anew with each installation, which for the long one
  // takes as long as the rest of an exec.
  int error = InstallProgram(filters, start.allow_bytes);
  return error != 0 ? error : InstallProgram(filters + start.allow_bytes, start.arguments_bytes);
}

// Everything below inherits the session keyring, and this one would be that of whoever started the
// daemon. An empty one instead; nothing inside can make keys, so all can share it. ENOSYS: a kernel
// without keys.
int LeaveKeyring() {
  long joined = ::syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, nullptr);
  return joined >= 0 || errno == ENOSYS ? 0 : -errno;
}

int HandleStart(const wire::Start& start, const int* fds, StepClock& clock, Shared& shared) {
  int error = EnterPrivateRoot(clock);
  if (error != 0) return error;
  LearnProc();
  shared.agent_image = fds[0];
  shared.log = fds[2];
  shared.dev_null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (shared.dev_null < 0) return clock.Fail(Step::kTemplate, -errno);
  error = LeaveKeyring();
  if (error == 0) error = LoadFilters(start, fds[1], shared);
  ::close(fds[1]);
  if (error != 0) return clock.Fail(Step::kFilters, error);
  clock.Done(Step::kFilters);
  return 0;
}

}  // namespace

int RunSpawner(char** argv) {
  static Shared shared;
  shared.control = kControl;
  shared.argv0 = argv[0];
  shared.argv0_size = std::strlen(argv[0]) + 1;
  ::close_range(kControl + 1, ~0u, 0);
  ::fcntl(kControl, F_SETFD, FD_CLOEXEC);
  ::prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
  ::signal(SIGCHLD, SIG_IGN);  // agents are reaped by the kernel; who cares holds a pidfd
  ::signal(SIGPIPE, SIG_IGN);

  union {
    wire::Start start = {};
    wire::Slot slot;
    wire::Worker worker;
  } request;
  int fds[kMaxFds];
  size_t count = kMaxFds;
  wire::Reply reply;
  StepClock clock(&reply);
  ssize_t size = os::ReceivePacketRaw(kControl, &request, sizeof(request), fds, &count, 0);
  if (size <= 0) return 1;
  int error = wire::WellFormed(request.start, static_cast<size_t>(size), count)
                  ? HandleStart(request.start, fds, clock, shared)
                  : clock.Fail(Step::kRequest, -EINVAL);
  if (os::SendPacketRaw(kControl, &reply, sizeof(reply), nullptr, 0, 0) != 0 || error != 0)
    return 1;

  while (true) {
    count = kMaxFds;
    size = os::ReceivePacketRaw(kControl, &request, sizeof(request), fds, &count, 0);
    if (size == 0 || size == -ECONNRESET) return 0;
    reply = {};
    static_assert(wire::kWorkerReplyFds == wire::kSlotReplyFds);
    int made[wire::kSlotReplyFds];
    size_t made_count = 0;
    if (size > 0 && wire::WellFormed(request.slot, static_cast<size_t>(size), count)) {
      if (MakeSlot(shared, request.slot, fds, &reply, made) == 0) made_count = wire::kSlotReplyFds;
    } else if (size > 0 && wire::WellFormed(request.worker, static_cast<size_t>(size), count)) {
      if (MakeWorker(shared, request.worker, fds, &reply, made) == 0)
        made_count = wire::kWorkerReplyFds;
    } else {
      reply.failed = Step::kRequest;
      reply.sys_errno = size < 0 ? static_cast<int>(-size) : EINVAL;
    }
    for (size_t i = 0; i < count; ++i) ::close(fds[i]);
    error = os::SendPacketRaw(kControl, &reply, sizeof(reply), made, made_count, 0);
    for (size_t i = 0; i < made_count; ++i) ::close(made[i]);
    if (error != 0) return 0;  // the slot ends with the launch socket that nobody holds
  }
}

}  // namespace dsec::spawn::stage
