// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace dsec::metrics {

using Labels = std::vector<std::pair<std::string, std::string>>;

// Only grows. An increment is one relaxed atomic addition.
class Counter {
 public:
  void Add(uint64_t by = 1) { value_.fetch_add(by, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_ = 0;
};

class Gauge {
 public:
  void Set(double value) { value_.store(value, std::memory_order_relaxed); }
  void Add(double by) { value_.fetch_add(by, std::memory_order_relaxed); }
  double value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> value_ = 0;
};

// Counts observations in fixed buckets. `bounds` are inclusive upper bounds in ascending order;
// +Inf is implied.
class Histogram {
 public:
  explicit Histogram(std::vector<double> bounds);
  void Observe(double value);
  // Not cumulative, one longer than bounds(): the last holds what lies above every bound.
  std::vector<uint64_t> counts() const;
  const std::vector<double>& bounds() const { return bounds_; }
  double sum() const { return sum_.load(std::memory_order_relaxed); }

 private:
  const std::vector<double> bounds_;
  const std::unique_ptr<std::atomic<uint64_t>[]> counts_;
  std::atomic<double> sum_ = 0;
};

// Bounds in seconds for things that take from 100 microseconds to a minute.
std::vector<double> LatencyBounds();

// The metrics of one process or test. Thread-safe. Get* finds or makes a series and is not cheap:
// callers keep the reference, which lives as long as the registry. A name has one kind, and names
// and label keys follow the Prometheus rules; both are checked as invariants, since they are
// literals of this program. Label values may be anything. A family holds at most kMaxSeries series:
// later label sets share one whose values are all "overflow", so that no caller can exhaust memory.
class Registry {
 public:
  static constexpr size_t kMaxSeries = 1000;

  Registry();
  ~Registry();
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;

  static Registry& Global();

  Counter& GetCounter(std::string_view name, std::string_view help, Labels labels = {});
  Gauge& GetGauge(std::string_view name, std::string_view help, Labels labels = {});
  // `bounds` of the first call for a name hold for all its series.
  Histogram& GetHistogram(std::string_view name, std::string_view help,
                          const std::vector<double>& bounds, Labels labels = {});

  // Everything in the Prometheus text exposition format 0.0.4, families and series in order of
  // name.
  std::string RenderPrometheus() const;

 private:
  enum class Kind { kCounter, kGauge, kHistogram };
  struct Series;
  struct Family;

  Series& Find(Kind kind, std::string_view name, std::string_view help, Labels labels,
               const std::vector<double>& bounds);

  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Family>, std::less<>> families_;
};

}  // namespace dsec::metrics
