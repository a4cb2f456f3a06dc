// SPDX-License-Identifier: Apache-2.0
#include "image/prefetcher.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/metrics.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kGivesWay{100};
constexpr milliseconds kHeldBack{500};
constexpr std::chrono::seconds kPressureWindow{10};  // avg10
constexpr size_t kMaxProcFile = 64 << 10;

// Linux 6.5, include/uapi/linux/mman.h; not in the headers of Debian 12.
struct CachestatRange {
  uint64_t offset, length;
};
struct Cachestat {
  uint64_t cached, dirty, writeback, evicted, recently_evicted;
};
constexpr long kCachestat = 451;

// Bytes of the range that have a page in the page cache.
Result<uint64_t> CachedBytes(int file, uint64_t offset, uint64_t length) {
  CachestatRange range{offset, length};
  Cachestat status{};
  if (::syscall(kCachestat, file, &range, &status, 0) != 0)
    return os::ErrnoError("layer.prefetch", "cachestat");
  return std::min(status.cached * kTracePage, length);
}

struct Metrics {
  metrics::Counter& layers = metrics::Registry::Global().GetCounter(
      "dsec_layers_traced_total", "Layers mounted that have a trace of first reads");
  metrics::Counter& read = metrics::Registry::Global().GetCounter(
      "dsec_layers_prefetch_read_bytes_total", "Bytes of layers read ahead");
  metrics::Counter& present = metrics::Registry::Global().GetCounter(
      "dsec_layers_prefetch_present_bytes_total",
      "Bytes of traces that were in the page cache when their turn came");
  metrics::Counter& dropped = metrics::Registry::Global().GetCounter(
      "dsec_layers_prefetch_dropped_bytes_total", "Bytes of traces that were not read ahead");
  metrics::Counter& held_back = metrics::Registry::Global().GetCounter(
      "dsec_layers_prefetch_held_back_total", "Waits for memory or less pressure");
  metrics::Gauge& waiting = metrics::Registry::Global().GetGauge(
      "dsec_layers_prefetch_waiting_bytes", "Bytes of traces that wait to be read ahead");
};
Metrics& TheMetrics() {
  static Metrics metrics;
  return metrics;
}

// What follows `key` in a file of /proc.
std::optional<double> NumberOf(std::string_view text, std::string_view key) {
  size_t at = text.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  at = text.find_first_not_of(' ', at + key.size());
  if (at == std::string_view::npos) return std::nullopt;
  double value = 0;
  const auto [end, failed] = std::from_chars(text.data() + at, text.data() + text.size(), value);
  if (failed != std::errc()) return std::nullopt;
  return value;
}

// A regular file of the layer; nothing else is ever opened for reading.
Result<os::UniqueFd> OpenFile(int mount, const std::string& path) {
  DSEC_TRY(const auto handle, os::OpenBeneath(mount, path.c_str(), O_PATH | O_NOFOLLOW));
  struct stat status;
  if (::fstat(handle.get(), &status) != 0) return os::ErrnoError("layer.prefetch", "stat a file");
  if (!S_ISREG(status.st_mode))
    return Error(Code::kInvalidArgument, "layer.prefetch", "no regular file");
  const std::string self = fmt::format("/proc/self/fd/{}", handle.get());
  return os::OpenAt(AT_FDCWD, self.c_str(), O_RDONLY);
}

}  // namespace

struct Prefetcher::State {
  // Threads that have no work left take a moment to be gone.
  explicit State(const PrefetchOptions& with) : options(with), threads(with.requests + 64) {}

  struct Job {
    std::weak_ptr<const os::UniqueFd> layer;
    std::vector<FirstTouch> plan;
    size_t next = 0;
    uint64_t left = 0;  // bytes from `next` on
  };
  struct Turn {
    std::weak_ptr<const os::UniqueFd> layer;
    FirstTouch part;
    std::shared_ptr<Job> job;
  };

  // The next request, of each layer in turn; waits while it may not begin. nullopt: there is none.
  std::optional<Turn> Next() {
    std::unique_lock lock(mutex);
    WaitForLeave(lock);
    while (!jobs.empty() && !closed) {
      const auto job = std::move(jobs.front());
      jobs.pop_front();
      if (job->layer.expired()) {
        Drop(*job);
        continue;
      }
      Turn turn{job->layer, job->plan[job->next++], job};
      job->left -= turn.part.length;
      Wait(-static_cast<int64_t>(turn.part.length));
      if (job->next < job->plan.size()) jobs.push_back(job);
      return turn;
    }
    --workers;
    return std::nullopt;
  }

  void WaitForLeave(std::unique_lock<std::mutex>& lock) {
    changed.wait_for(lock, kGivesWay, [&] { return foreground == 0 || closed; });
    while (!jobs.empty() && !closed) {
      const bool idle = Clock::System().Mono() - last_read >= kPressureWindow;
      lock.unlock();
      const bool held = MustHoldBack(idle);
      lock.lock();
      if (!held) return;
      ++figures.held_back;
      TheMetrics().held_back.Add();
      changed.wait_for(lock, kHeldBack, [&] { return closed; });
    }
  }

  std::string ProcFile(const char* name) const {
    auto read = os::ReadFile(AT_FDCWD, (options.proc + name).c_str(), kMaxProcFile);
    return read.ok() ? *std::move(read) : std::string();
  }

  // What one layer may have read ahead: as much as is free, or a small part of what the page cache
  // could give up for it.
  uint64_t Budget() const {
    constexpr double kKib = 1024, kShare = 16;
    const std::string memory = ProcFile("/meminfo");
    const double free = NumberOf(memory, "MemFree:").value_or(0);
    const double available = NumberOf(memory, "MemAvailable:").value_or(0);
    return static_cast<uint64_t>(std::max(free / 2, available / kShare) * kKib);
  }

  bool MustHoldBack(bool io_too) const {
    const std::string memory = ProcFile("/meminfo");
    const auto total = NumberOf(memory, "MemTotal:");
    const auto available = NumberOf(memory, "MemAvailable:");
    if (!total || !available || *available < *total * options.memory_available_min) return true;
    // Without PSI in the kernel there is nothing to go by.
    const auto waits = NumberOf(ProcFile("/pressure/memory"), "some avg10=");
    if (waits && *waits > options.psi_memory_max) return true;
    if (!io_too) return false;
    const auto io = NumberOf(ProcFile("/pressure/io"), "some avg10=");
    return io && *io > options.psi_io_max;
  }

  // Until `bytes` more may be read. False: closed.
  bool Pace(uint64_t bytes) {
    std::unique_lock lock(mutex);
    const MonoTime now = Clock::System().Mono();
    const MonoTime begin = std::max(now, free_at);
    free_at = begin + nanoseconds(static_cast<int64_t>(
                          static_cast<double>(bytes) * 1e9 /
                          static_cast<double>(std::max<uint64_t>(options.bytes_per_s, 1))));
    last_read = free_at;
    return !changed.wait_until(lock, begin, [&] { return closed; });
  }

  void Wait(int64_t bytes) {
    figures.waiting_bytes += static_cast<uint64_t>(bytes);
    TheMetrics().waiting.Add(static_cast<double>(bytes));
  }

  void Lose(uint64_t bytes) {
    figures.dropped_bytes += bytes;
    TheMetrics().dropped.Add(bytes);
  }

  void Drop(Job& job) {
    Lose(job.left);
    Wait(-static_cast<int64_t>(job.left));
    job.left = 0;
    job.next = job.plan.size();
  }

  // One request, of bytes that lie within the file.
  Result<void> ReadPart(int mount, const FirstTouch& part) {
    DSEC_FAULT_POINT("layer.prefetch.before_read");
    DSEC_TRY(const auto file, OpenFile(mount, part.path));
    struct stat status;
    if (::fstat(file.get(), &status) != 0) return os::ErrnoError("layer.prefetch", "stat a file");
    const auto size = static_cast<uint64_t>(status.st_size);
    if (part.offset >= size) return Ok();
    const uint64_t length = std::min(part.length, size - part.offset);
    DSEC_TRY(const uint64_t present, CachedBytes(file.get(), part.offset, length));
    Count(&Figures::present_bytes, TheMetrics().present, present);
    if (present == length) return Ok();
    if (!Pace(length - present)) return Ok();
    const auto offset = static_cast<off_t>(part.offset);
    const auto end = static_cast<off_t>(part.offset + length);
    // The first: that the reads below read no more than they say.
    for (const int advice : {POSIX_FADV_RANDOM, POSIX_FADV_WILLNEED}) {
      const int failed = ::posix_fadvise(file.get(), offset, static_cast<off_t>(length), advice);
      if (failed == 0) continue;
      errno = failed;
      return os::ErrnoError("layer.prefetch", "read a file ahead");
    }
    // Readahead tells no errors; a page that could not be read is read once more by these.
    for (const off_t at : {offset, end - 1}) {
      char byte = 0;
      if (::pread(file.get(), &byte, 1, at) < 0)
        return os::ErrnoError("layer.prefetch", "read a file ahead");
    }
    DSEC_TRY(const uint64_t cached, CachedBytes(file.get(), part.offset, length));
    Count(&Figures::read_bytes, TheMetrics().read, cached - std::min(cached, present));
    return Ok();
  }

  void Count(uint64_t Figures::* figure, metrics::Counter& metric, uint64_t bytes) {
    metric.Add(bytes);
    const std::lock_guard lock(mutex);
    figures.*figure += bytes;
    last_read = std::max(last_read, Clock::System().Mono());
  }

  void Work() {
    while (auto turn = Next()) {
      Result<void> read = Ok();
      if (const auto layer = turn->layer.lock()) {
        read = ReadPart(layer->get(), turn->part);
      } else {
        const std::lock_guard lock(mutex);
        Lose(turn->part.length);
      }
      if (read.ok()) continue;
      // A name that leads to no file is the trace's fault; all else ends the layer's turn.
      const bool harmless = read.error().sys_errno() == ENOENT ||
                            read.error().sys_errno() == ELOOP ||
                            read.error().sys_errno() == ENOTDIR || read.error().sys_errno() == 0;
      const std::lock_guard lock(mutex);
      Lose(turn->part.length);
      if (harmless) continue;
      log::Warn("layer.prefetch_ended", {{"error", read.error()}});
      std::erase(jobs, turn->job);
      Drop(*turn->job);
    }
  }

  const PrefetchOptions options;
  RootThreads threads;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  size_t workers = 0;
  size_t foreground = 0;
  bool closed = false;
  MonoTime free_at = {};
  MonoTime last_read = MonoTime() - kPressureWindow;
  Figures figures;
};

Prefetcher::Prefetcher(const PrefetchOptions& options) : state_(std::make_shared<State>(options)) {
  TheMetrics();  // shown from the start
}

Prefetcher::~Prefetcher() { Close(); }

bool Prefetcher::wanted() const { return state_->options.requests > 0; }

void Prefetcher::Add(std::weak_ptr<const os::UniqueFd> layer, const LayerTrace& trace) {
  auto job = std::make_shared<State::Job>();
  job->layer = std::move(layer);
  job->plan = PlanReads(trace, state_->options.request_bytes);
  const uint64_t budget = state_->Budget();
  uint64_t beyond = 0;
  std::erase_if(job->plan, [&](const FirstTouch& part) {
    const bool fits = beyond == 0 && part.length <= budget - job->left;
    (fits ? job->left : beyond) += part.length;
    return !fits;
  });
  const std::lock_guard lock(state_->mutex);
  if (!wanted() || state_->closed) return;
  ++state_->figures.layers;
  TheMetrics().layers.Add();
  state_->Lose(beyond);
  if (state_->jobs.size() >= state_->options.layers) return state_->Lose(job->left);
  if (job->plan.empty()) return;
  state_->Wait(static_cast<int64_t>(job->left));
  state_->jobs.push_back(std::move(job));
  while (state_->workers < std::min(state_->options.requests, state_->jobs.size() + 1)) {
    // Owns what it uses; counted before it runs.
    ++state_->workers;
    if (state_->threads.Start([state = state_] { state->Work(); })) continue;
    --state_->workers;
    break;
  }
}

void Prefetcher::Close() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed = true;
    for (const auto& job : state_->jobs) state_->Drop(*job);
    state_->jobs.clear();
  }
  state_->changed.notify_all();
}

bool Prefetcher::Wait(milliseconds patience) const { return state_->threads.Wait(patience); }

Prefetcher::Foreground::Foreground(Prefetcher& prefetcher) : prefetcher_(prefetcher) {
  const std::lock_guard lock(prefetcher_.state_->mutex);
  ++prefetcher_.state_->foreground;
}

Prefetcher::Foreground::~Foreground() {
  {
    const std::lock_guard lock(prefetcher_.state_->mutex);
    --prefetcher_.state_->foreground;
  }
  prefetcher_.state_->changed.notify_all();
}

Prefetcher::Figures Prefetcher::figures() const {
  const std::lock_guard lock(state_->mutex);
  return state_->figures;
}

}  // namespace dsec::image
