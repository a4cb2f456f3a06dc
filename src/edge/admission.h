// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "edge/options.h"

namespace dsec::edge {

// What admission looks at on the host.
struct HostMeters {
  uint64_t memory_total_bytes = 0;
  uint64_t memory_available_bytes = 0;
  uint64_t disk_free_bytes = 0;      // of the fullest of the watched file systems
  double psi_memory_some_avg10 = 0;  // 0 on a kernel without PSI
  double psi_cpu_some_avg10 = 0;
};

// Reads <proc_root>/{meminfo,pressure/*} and statvfs of each path: about 30 microseconds, never
// blocks on a disk.
Result<HostMeters> ReadHostMeters(const std::string& proc_root,
                                  const std::vector<std::string>& disk_paths);

// Decides whether one more sandbox fits and counts those that are here. Thread-safe.
class Admission {
 public:
  using ReadMeters = std::function<Result<HostMeters>()>;

  // The place of one sandbox, given back on destruction. May outlive the Admission.
  class Place {
   public:
    Place() = default;
    Place(Place&&) noexcept = default;
    Place& operator=(Place&& other) noexcept;
    ~Place() { Release(); }
    // The create is over: its memory shows in MemAvailable from now on.
    void Settle();
    void Release();
    explicit operator bool() const { return shared_ != nullptr; }

   private:
    friend class Admission;
    explicit Place(std::shared_ptr<struct AdmissionShared> shared) : shared_(std::move(shared)) {}
    std::shared_ptr<struct AdmissionShared> shared_;
    bool settled_ = false;
  };

  // For TryEnter, meters are read again when they are older than 25 ms. `freed` is called, on
  // whatever thread, after a place came back.
  Admission(const AdmissionOptions& options, ReadMeters read, const Clock& clock,
            std::function<void()> freed);

  // kResourceExhausted capacity.count, capacity.memory, capacity.disk or capacity.pressure names
  // what is short; an unreadable meter is kUnavailable capacity.unknown.
  Result<Place> TryEnter();
  // The place of a sandbox that is here already.
  Place Readmit();

  uint64_t live() const;
  // Reads the meters now; what TryEnter decides from then on is no older than the answer.
  Result<HostMeters> Measure();

 private:
  Result<void> MeasureLocked();
  Result<void> Check(uint64_t live, uint64_t creating);

  const AdmissionOptions options_;
  const ReadMeters read_;
  const Clock& clock_;
  const std::shared_ptr<struct AdmissionShared> shared_;
  std::mutex mutex_;
  MonoTime read_at_{};
  HostMeters meters_;
};

}  // namespace dsec::edge
