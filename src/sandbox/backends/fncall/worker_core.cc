// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/worker_core.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "os/file.h"
#include "sandbox/backends/fncall/call.h"

namespace dsec::sandbox {
namespace {

using std::chrono::seconds;

constexpr auto kMakeTime = seconds(20);
constexpr auto kCellTime = seconds(10);
constexpr auto kWarmTime = seconds(60);
constexpr auto kRemoveTime = seconds(10);
// Between attempts to remove what would not go.
constexpr auto kFirstBackoff = std::chrono::milliseconds(100);
constexpr auto kLastBackoff = seconds(30);
// After the daemon has asked for the end, the next sweep may take over.
constexpr int kAttemptsAtEnd = 2;

MonoTime Now() { return Clock::System().Mono(); }

}  // namespace

template <typename T>
void WorkerCore::Deliver(std::shared_ptr<Delivery<T>> to, Result<T> result) {
  Delivery<T>& delivery = *to;
  boost::asio::post(delivery.executor, [to = std::move(to), result = std::move(result)]() mutable {
    to->result.emplace(std::move(result));
    to->done.Set();
  });
}

WorkerCore::WorkerCore(Options options)
    : options_(std::move(options)),
      text_(options_.name.str()),
      host_(options_.parts, options_.name),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  thread_ = std::thread([this] { Main(); });
}

WorkerCore::~WorkerCore() = default;

bool WorkerCore::stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

bool WorkerCore::finished() const {
  const std::lock_guard lock(mutex_);
  return finished_;
}

void WorkerCore::Join() {
  if (thread_.joinable()) thread_.join();
}

void WorkerCore::Stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  const uint64_t one = 1;
  // Cannot fail: the counter is far from its end.
  static_cast<void>(::write(stop_.get(), &one, sizeof(one)));
  wake_.notify_all();
}

void WorkerCore::Close() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  Stop();
}

Result<os::UniqueFd> WorkerCore::RunnerFd() const {
  const std::lock_guard lock(mutex_);
  os::UniqueFd copy(::fcntl(runner_fd_.get(), F_DUPFD_CLOEXEC, 3));
  if (!copy.valid()) return os::ErrnoError("fn.worker", "duplicate the runner's descriptor");
  return copy;
}

runtime::Task<void> WorkerCore::AwaitReady(runtime::Deadline deadline) {
  const auto delivery = std::make_shared<Delivery<void>>(co_await boost::asio::this_coro::executor);
  {
    const std::lock_guard lock(mutex_);
    if (over_.has_value()) co_return *over_;
    if (ready_) co_return Ok();
    waits_ready_ = delivery;
  }
  auto waited = co_await delivery->done.Wait(deadline);
  if (delivery->result.has_value()) co_return std::move(*delivery->result);
  co_return waited;
}

runtime::Task<FnReport> WorkerCore::Run(FnRun run, runtime::Deadline deadline) {
  const auto delivery =
      std::make_shared<Delivery<FnReport>>(co_await boost::asio::this_coro::executor);
  {
    const std::lock_guard lock(mutex_);
    if (over_.has_value()) co_return *over_;
    if (stopping_ || job_.has_value())
      co_return Error(Code::kConflict, "fn.worker_busy", "the worker has a call");
    job_.emplace(Job{std::move(run), deadline, delivery});
    wake_.notify_all();
  }
  auto waited = co_await delivery->done.Wait(deadline);
  if (!waited.ok() && waited.error().code() == Code::kDeadlineExceeded) {
    if (Withdraw(*delivery)) {
      Stop();
      co_return Error(Code::kUnavailable, "fn.worker_broken", "no cell was ready in time");
    }
    // It runs, within limits of its own.
    waited = co_await delivery->done.Wait(runtime::Deadline::Never());
  }
  if (!waited.ok()) {
    // The call's bytes are the caller's: they are used until the thread has let go of them.
    Stop();
    co_await delivery->done.WaitUncancelled();
    co_return std::move(waited).error();
  }
  co_return std::move(*delivery->result);
}

bool WorkerCore::Withdraw(const Delivery<FnReport>& of) {
  const std::lock_guard lock(mutex_);
  if (!job_.has_value() || job_->delivery.get() != &of) return false;
  job_.reset();
  return true;
}

Result<void> WorkerCore::Make() {
  const ViewShape view{std::max(std::thread::hardware_concurrency(), 1u) * 1000u,
                       options_.prepared.memory_bytes()};
  DSEC_TRY_VOID(host_.Make(options_.layers, view, runtime::Deadline::After(kMakeTime)));
  DSEC_TRY_VOID(Prepare({}));
  const std::lock_guard lock(mutex_);
  runner_fd_.Reset(::fcntl(host_.runner().fd(), F_DUPFD_CLOEXEC, 3));
  if (!runner_fd_.valid()) return os::ErrnoError("fn.worker", "duplicate the runner's descriptor");
  ready_ = true;
  if (waits_ready_ != nullptr) Deliver(std::exchange(waits_ready_, nullptr), Result<void>());
  return Ok();
}

Result<void> WorkerCore::Prepare(const std::vector<std::string>& devices) {
  const bool warm = !options_.warm.kind().empty();
  if (warm) {
    DSEC_TRY_VOID(host_.Heat(options_.warm, options_.prepared, stop_.get(),
                             runtime::Deadline::After(kWarmTime)));
  }
  DSEC_TRY(cell_, host_.MakeCell(options_.prepared, devices, runtime::Deadline::After(kCellTime)));
  if (!warm) return Ok();
  return host_.Warm(*cell_, options_.prepared, stop_.get(), runtime::Deadline::After(kCellTime));
}

Result<void> WorkerCore::EndCell() {
  DSEC_TRY(const auto ended, host_.EndCell(std::move(*std::exchange(cell_, std::nullopt)),
                                           runtime::Deadline::After(kCellTime)));
  if (ended.dirt.empty()) return Ok();
  return Error(Code::kUnavailable, "fn.worker_broken", ended.dirt);
}

std::optional<WorkerCore::Job> WorkerCore::NextJob() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return stopping_ || job_.has_value(); });
  if (stopping_) return std::nullopt;
  return std::exchange(job_, std::nullopt);
}

Result<FnReport> WorkerCore::Do(Job& job) {
  if (!job.run.devices.empty()) {
    // The cell that waits has none; the next one after this call will again.
    DSEC_TRY_VOID(EndCell());
    DSEC_TRY_VOID(Prepare(job.run.devices));
  }
  return RunCall(host_, *cell_, job.run, stop_.get());
}

// No further call.
void WorkerCore::Finish(const Error& why) {
  host_.Kill();
  const std::lock_guard lock(mutex_);
  over_ = why;
  if (waits_ready_ != nullptr) Deliver(std::exchange(waits_ready_, nullptr), Result<void>(why));
  if (job_.has_value()) {
    Deliver(std::exchange(job_->delivery, nullptr), Result<FnReport>(why));
    job_.reset();
  }
}

void WorkerCore::Main() {
  // A program need not read what it is sent.
  sigset_t pipe;
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  auto lives = Make();
  while (lives.ok()) {
    auto job = NextJob();
    if (!job.has_value()) break;
    auto report = Do(*job);
    const bool over = report.ok() ? report->dirty : report.error().reason() != "fn.exec_failed";
    if (over) {
      lives = report.ok() ? Error(Code::kUnavailable, "fn.worker_broken", report->dirt)
                          : report.error();
    }
    job->run = FnRun();
    Deliver(std::exchange(job->delivery, nullptr), std::move(report));
    if (over) break;
    // What follows is for the next call, and that waits for it.
    lives = EndCell();
    if (lives.ok()) lives = Prepare({});
  }
  if (lives.ok()) {
    Finish(Error(Code::kUnavailable, "fn.worker_died", "the worker was ended"));
  } else {
    if (!stopping()) log::Warn("fn.worker_over", {{"worker", text_}, {"error", lives.error()}});
    Error why = lives.error();
    if (!why.reason().starts_with("fn.")) {
      why = Error(Code::kUnavailable, "fn.worker_broken", std::move(why).ToString());
    }
    Finish(why);
  }
  cell_.reset();
  RemoveAll();
  const std::lock_guard lock(mutex_);
  finished_ = true;
}

void WorkerCore::RemoveAll() {
  auto backoff = std::chrono::duration_cast<std::chrono::milliseconds>(kFirstBackoff);
  int attempts_at_end = 0;
  while (true) {
    const auto removed = host_.Remove(Now() + kRemoveTime);
    if (removed.ok()) {
      options_.parts.indices.Release(options_.name);
      return;
    }
    log::Warn("fn.remove_failed", {{"worker", text_}, {"error", removed.error()}});
    std::unique_lock lock(mutex_);
    if (closing_ && ++attempts_at_end >= kAttemptsAtEnd) return;
    wake_.wait_for(lock, backoff, [this, was = closing_] { return closing_ && !was; });
    backoff = std::min<std::chrono::milliseconds>(backoff * 2, kLastBackoff);
  }
}

}  // namespace dsec::sandbox
