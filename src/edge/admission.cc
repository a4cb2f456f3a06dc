// SPDX-License-Identifier: Apache-2.0
#include "edge/admission.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace dsec::edge {
namespace {

constexpr std::chrono::milliseconds kMetersAge{25};

// The whole of a small proc file; empty optional when there is none.
Result<std::optional<std::string>> ReadProc(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    if (errno == ENOENT) return std::optional<std::string>();
    return Error::FromErrno(errno, "capacity.unknown", fmt::format("open {}", path));
  }
  std::array<char, 8192> buffer;
  const ssize_t size = read(file, buffer.data(), buffer.size());
  const int sys_errno = errno;
  close(file);
  // Pressure files of a kernel with psi=0 open and then fail with EOPNOTSUPP.
  if (size < 0 && sys_errno == EOPNOTSUPP) return std::optional<std::string>();
  if (size < 0)
    return Error::FromErrno(sys_errno, "capacity.unknown", fmt::format("read {}", path));
  return std::optional(std::string(buffer.data(), static_cast<size_t>(size)));
}

template <typename T>
std::optional<T> NumberAfter(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + key.size());
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  T value{};
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

Result<double> ReadPressure(const std::string& path) {
  DSEC_TRY(const auto text, ReadProc(path));
  if (!text.has_value()) return 0.0;
  const auto value = NumberAfter<double>(*text, "some avg10=");
  if (!value.has_value()) {
    return Error(Code::kUnavailable, "capacity.unknown",
                 fmt::format("{} has no \"some avg10\"", path));
  }
  return *value;
}

Error NoRoom(std::string_view reason, std::string message) {
  return Error(Code::kResourceExhausted, reason, std::move(message));
}

}  // namespace

struct AdmissionShared {
  std::function<void()> freed;
  mutable std::mutex mutex;
  uint64_t live = 0;
  uint64_t creating = 0;
};

Result<HostMeters> ReadHostMeters(const std::string& proc_root,
                                  const std::vector<std::string>& disk_paths) {
  HostMeters meters;
  const std::string path = proc_root + "/meminfo";
  DSEC_TRY(const auto text, ReadProc(path));
  const auto total = NumberAfter<uint64_t>(text.value_or(""), "MemTotal:");
  const auto available = NumberAfter<uint64_t>(text.value_or(""), "MemAvailable:");
  if (!total.has_value() || !available.has_value()) {
    return Error(Code::kUnavailable, "capacity.unknown",
                 fmt::format("{} has no MemTotal or MemAvailable", path));
  }
  meters.memory_total_bytes = *total * 1024;
  meters.memory_available_bytes = *available * 1024;
  DSEC_TRY(meters.psi_memory_some_avg10, ReadPressure(proc_root + "/pressure/memory"));
  DSEC_TRY(meters.psi_cpu_some_avg10, ReadPressure(proc_root + "/pressure/cpu"));
  meters.disk_free_bytes = std::numeric_limits<uint64_t>::max();
  for (const std::string& disk : disk_paths) {
    struct statvfs status = {};
    if (statvfs(disk.c_str(), &status) != 0) {
      return Error::FromErrno(errno, "capacity.unknown", fmt::format("statvfs {}", disk));
    }
    meters.disk_free_bytes = std::min<uint64_t>(
        meters.disk_free_bytes, static_cast<uint64_t>(status.f_bavail) * status.f_frsize);
  }
  return meters;
}

Admission::Place& Admission::Place::operator=(Place&& other) noexcept {
  if (this != &other) {
    Release();
    shared_ = std::move(other.shared_);
    settled_ = other.settled_;
  }
  return *this;
}

void Admission::Place::Settle() {
  if (shared_ == nullptr || std::exchange(settled_, true)) return;
  std::lock_guard lock(shared_->mutex);
  --shared_->creating;
}

void Admission::Place::Release() {
  if (shared_ == nullptr) return;
  Settle();
  const auto shared = std::exchange(shared_, nullptr);
  {
    std::lock_guard lock(shared->mutex);
    --shared->live;
  }
  shared->freed();
}

Admission::Admission(const AdmissionOptions& options, ReadMeters read, const Clock& clock,
                     std::function<void()> freed)
    : options_(options),
      read_(std::move(read)),
      clock_(clock),
      shared_(std::make_shared<AdmissionShared>()) {
  shared_->freed = std::move(freed);
}

Result<Admission::Place> Admission::TryEnter() {
  std::lock_guard lock(mutex_);
  uint64_t live = 0;
  uint64_t creating = 0;
  {
    std::lock_guard shared_lock(shared_->mutex);
    live = shared_->live;
    creating = shared_->creating;
  }
  // Only this function raises the two, under mutex_: what is checked can only have become smaller.
  DSEC_TRY_VOID(Check(live, creating));
  {
    std::lock_guard shared_lock(shared_->mutex);
    ++shared_->live;
    ++shared_->creating;
  }
  return Place(shared_);
}

Admission::Place Admission::Readmit() {
  std::lock_guard lock(shared_->mutex);
  ++shared_->live;
  Place place(shared_);
  place.settled_ = true;
  return place;
}

uint64_t Admission::live() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->live;
}

Result<HostMeters> Admission::Measure() {
  std::lock_guard lock(mutex_);
  DSEC_TRY_VOID(MeasureLocked());
  return meters_;
}

Result<void> Admission::MeasureLocked() {
  const MonoTime now = clock_.Mono();
  auto meters = read_();
  if (!meters.ok()) return Error(Code::kUnavailable, "capacity.unknown", meters.error().ToString());
  meters_ = *meters;
  read_at_ = now;
  return Ok();
}

Result<void> Admission::Check(uint64_t live, uint64_t creating) {
  if (live >= options_.max_sandboxes) {
    return NoRoom("capacity.count", fmt::format("{} sandboxes are live, the node holds {}", live,
                                                options_.max_sandboxes));
  }
  if (read_at_ == MonoTime() || clock_.Mono() - read_at_ > kMetersAge)
    DSEC_TRY_VOID(MeasureLocked());
  const uint64_t needed =
      options_.memory_reserve_bytes + (creating + 1) * options_.memory_per_create_bytes;
  if (options_.memory_reserve_bytes != 0 && meters_.memory_available_bytes < needed) {
    return NoRoom(
        "capacity.memory",
        fmt::format(
            "{} bytes of memory are available, {} are needed for the reserve and {} creates",
            meters_.memory_available_bytes, needed, creating + 1));
  }
  if (meters_.disk_free_bytes < options_.disk_reserve_bytes) {
    return NoRoom("capacity.disk",
                  fmt::format("{} bytes of disk are free, {} are kept in reserve",
                              meters_.disk_free_bytes, options_.disk_reserve_bytes));
  }
  if (options_.psi_memory_max != 0 && meters_.psi_memory_some_avg10 > options_.psi_memory_max) {
    return NoRoom("capacity.pressure",
                  fmt::format("memory pressure is {}%, the most is {}%",
                              meters_.psi_memory_some_avg10, options_.psi_memory_max));
  }
  if (options_.psi_cpu_max != 0 && meters_.psi_cpu_some_avg10 > options_.psi_cpu_max) {
    return NoRoom("capacity.pressure",
                  fmt::format("CPU pressure is {}%, the most is {}%", meters_.psi_cpu_some_avg10,
                              options_.psi_cpu_max));
  }
  return Ok();
}

}  // namespace dsec::edge
