// SPDX-License-Identifier: Apache-2.0
#include "cluster/epoch_gate.h"

#include <fcntl.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/fault.h"
#include "base/log.h"
#include "ca/key_files.h"
#include "cluster/node_record.h"
#include "os/file.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;

constexpr std::chrono::seconds kFenceTime{60};  // of one attempt
constexpr size_t kMaxFile = 256;

// "dsec-epoch 1\n<epoch>\n<fencing>\n"
constexpr std::string_view kHead = "dsec-epoch 1\n";

bool TakeNumber(std::string_view& text, uint64_t& out) {
  const size_t end = text.find('\n');
  if (end == std::string_view::npos || end == 0) return false;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + end, out);
  if (error != std::errc() || stop != text.data() + end) return false;
  text.remove_prefix(end + 1);
  return true;
}

}  // namespace

Error StaleEpochError(uint64_t theirs, uint64_t own) {
  return Error(
      Code::kFailedPrecondition, "edge.epoch_stale",
      fmt::format("the caller knows epoch {} of this node, which has epoch {}", theirs, own));
}

FencingGate::FencingGate(std::string path, runtime::Executor home, Fence fence)
    : path_(std::move(path)),
      home_(std::move(home)),
      fence_(std::move(fence)),
      disk_("epoch", 1, 8) {}

FencingGate::~FencingGate() = default;

Result<std::unique_ptr<FencingGate>> FencingGate::Open(std::string path, runtime::Executor home,
                                                       Fence fence) {
  std::unique_ptr<FencingGate> gate(
      new FencingGate(std::move(path), std::move(home), std::move(fence)));
  auto text = os::ReadFile(AT_FDCWD, gate->path_.c_str(), kMaxFile);
  if (!text.ok()) {
    if (text.error().sys_errno() == ENOENT) return gate;
    return std::move(text).error();
  }
  std::string_view rest = *text;
  if (!rest.starts_with(kHead)) rest = {};
  rest.remove_prefix(std::min(rest.size(), kHead.size()));
  if (!TakeNumber(rest, gate->epoch_) || !TakeNumber(rest, gate->fencing_) || !rest.empty() ||
      (gate->fencing_ != 0 && gate->fencing_ <= gate->epoch_)) {
    return Error(Code::kInternal, "edge.epoch_damaged",
                 fmt::format("{} is damaged; `dsec purge` ends all of this node and removes it",
                             gate->path_));
  }
  return gate;
}

Task<void> FencingGate::Write(uint64_t epoch, uint64_t fencing) {
  auto write = [path = path_, text = fmt::format("{}{}\n{}\n", kHead, epoch, fencing)] {
    return ca::WriteWhole(path, text);
  };
  auto written = co_await disk_.Run(std::move(write), Deadline::Never());
  co_return std::move(written);
}

Task<void> FencingGate::FenceOnce() {
  const uint64_t next = fencing_;
  // Before the first sandbox ends: a daemon that starts after a crash must not go on with the rest
  // under the old epoch.
  auto intent = co_await Write(epoch_, next);
  if (!intent.ok()) co_return std::move(intent).error();
  DSEC_CO_FAULT_POINT("epoch.after_intent");
  log::Warn("edge.fencing", {{"from", epoch_}, {"to", next}});
  auto fenced =
      co_await fence_(fmt::format("fenced: the node has epoch {} in place of {}", next, epoch_),
                      Deadline::After(kFenceTime));
  if (!fenced.ok()) co_return std::move(fenced).error();
  DSEC_CO_FAULT_POINT("epoch.after_fence");
  // A still higher one may have come meanwhile; it has its own turn.
  auto taken = co_await Write(next, 0);
  if (!taken.ok()) co_return std::move(taken).error();
  epoch_ = next;
  if (fencing_ == next) fencing_ = 0;
  log::Info("edge.epoch", {{"epoch", epoch_}});
  co_return Ok();
}

boost::asio::awaitable<void> FencingGate::RunFence() {
  while (fencing_ != 0) {
    auto done = co_await runtime::internal::Caught(FenceOnce());
    if (done.ok()) continue;
    log::Error("edge.fencing_failed", {{"error", done.error()}});
    last_error_ = std::move(done).error();
    break;
  }
  running_ = false;
  changed_.Set();
}

Task<void> FencingGate::Check(uint64_t epoch, Deadline deadline) {
  // One that was taken could never be followed by another.
  if (epoch > kMaxEpoch) {
    co_return Error(Code::kInvalidArgument, "edge.epoch",
                    fmt::format("epoch {} is more than {}", epoch, kMaxEpoch))
        .WithField("epoch");
  }
  for (;;) {
    const uint64_t own = std::max(epoch_, fencing_);
    if (epoch < own) co_return StaleEpochError(epoch, own);
    if (Serves(epoch)) co_return Ok();
    fencing_ = epoch;
    if (!running_) {
      running_ = true;
      last_error_.reset();
      auto work = runtime::SpawnCancellable(gate_, home_, RunFence());
      if (work) {
        // It may have ended already.
        if (running_) fence_work_ = std::move(work);
      } else {
        running_ = false;
        co_return Error(Code::kUnavailable, "edge.stopping", "this daemon is being stopped");
      }
    }
    changed_.Reset();
    auto waited = co_await changed_.Wait(deadline);
    if (!waited.ok() && waited.error().code() != Code::kDeadlineExceeded) {
      co_return std::move(waited).error();
    }
    if (Serves(epoch)) continue;
    if (!waited.ok() || last_error_) {
      co_return Error(Code::kUnavailable, "edge.fencing",
                      fmt::format("the node still ends what it had before epoch {}{}", epoch,
                                  last_error_ ? ": " + last_error_->ToString() : std::string()));
    }
  }
}

Task<void> FencingGate::Resume(Deadline deadline) {
  if (fencing_ == 0) co_return Ok();
  auto done = co_await Check(fencing_, deadline);
  co_return std::move(done);
}

boost::asio::awaitable<void> FencingGate::Stop() {
  fence_work_.Cancel();
  co_await gate_.Close();
}

}  // namespace dsec::cluster
