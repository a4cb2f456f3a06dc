// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/freezer.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "os/file.h"
#include "sandbox/isolators/control_file.h"

namespace dsec::sandbox {
namespace {

constexpr char kSwitch[] = "cgroup.freeze";

Result<os::UniqueFd> OpenCode(int top, const SlotName& slot) {
  return os::OpenAt(top, (slot.str() + "/code").c_str(), O_RDONLY | O_DIRECTORY);
}

Result<void> AwaitFrozen(int code, MonoTime deadline) {
  DSEC_TRY(const auto events, os::OpenAt(code, "cgroup.events", O_RDONLY));
  while (true) {
    char text[256];
    const ssize_t size = ::pread(events.get(), text, sizeof(text), 0);
    if (size < 0) return os::ErrnoError("pack.freeze", "cgroup.events");
    if (ControlValue({text, static_cast<size_t>(size)}, "frozen") == 1) return Ok();
    const auto left = deadline - Clock::System().Mono();
    if (left <= std::chrono::nanoseconds::zero()) {
      return Error(Code::kUnavailable, "pack.not_frozen",
                   "processes of the sandbox did not come to a stop in time");
    }
    const auto left_ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    // POLLPRI comes with the next change after the read (cgroup-v2.rst).
    pollfd item = {events.get(), POLLPRI, 0};
    ::poll(&item, 1, static_cast<int>(std::min<int64_t>(left_ms, 60'000)));
  }
}

}  // namespace

Result<FrozenCode> FrozenCode::Freeze(int top, const SlotName& slot, MonoTime deadline) {
  DSEC_TRY(auto code, OpenCode(top, slot));
  FrozenCode frozen(std::move(code));
  DSEC_TRY_VOID(os::WriteExisting(frozen.code_.get(), kSwitch, "1"));
  DSEC_TRY_VOID(AwaitFrozen(frozen.code_.get(), deadline));
  return frozen;
}

Result<void> FrozenCode::Thaw(int top, const SlotName& slot) {
  auto code = OpenCode(top, slot);
  if (!code.ok()) {
    return code.error().code() == Code::kNotFound ? Ok() : Result<void>(std::move(code).error());
  }
  return os::WriteExisting(code->get(), kSwitch, "0");
}

FrozenCode::~FrozenCode() {
  if (!code_.valid()) return;
  if (auto thawed = Thaw(); !thawed.ok()) {
    log::Error("sandbox.thaw_failed", {{"error", thawed.error()}});
  }
}

Result<void> FrozenCode::Thaw() {
  const os::UniqueFd code = std::move(code_);
  auto written = os::WriteExisting(code.get(), kSwitch, "0");
  // Removed with its sandbox meanwhile.
  if (!written.ok() &&
      (written.error().sys_errno() == ENODEV || written.error().code() == Code::kNotFound)) {
    return Ok();
  }
  return written;
}

}  // namespace dsec::sandbox
