// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>

namespace dsec {

// A size in bytes.
class Bytes {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(uint64_t count) : count_(count) {}
  static constexpr Bytes KiB(uint64_t n) { return Bytes(n << 10); }
  static constexpr Bytes MiB(uint64_t n) { return Bytes(n << 20); }
  static constexpr Bytes GiB(uint64_t n) { return Bytes(n << 30); }
  constexpr uint64_t count() const { return count_; }
  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes operator+(Bytes other) const { return Bytes(count_ + other.count_); }
  // Saturates at zero.
  constexpr Bytes operator-(Bytes other) const {
    return Bytes(count_ > other.count_ ? count_ - other.count_ : 0);
  }

 private:
  uint64_t count_ = 0;
};

// CPU capacity in thousandths of one core.
class MilliCpu {
 public:
  constexpr MilliCpu() = default;
  constexpr explicit MilliCpu(uint64_t count) : count_(count) {}
  constexpr uint64_t count() const { return count_; }
  // Cores that code inside sees: the limit rounded up, at least one.
  constexpr uint64_t VisibleCores() const { return count_ == 0 ? 1 : (count_ + 999) / 1000; }
  constexpr auto operator<=>(const MilliCpu&) const = default;

 private:
  uint64_t count_ = 0;
};

}  // namespace dsec
