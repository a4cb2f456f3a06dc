// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>

namespace dsec {

// Deterministic generator (xoshiro256**, public domain algorithm by Blackman and Vigna). The same
// seed gives the same sequence on every platform and library; the standard's distributions and
// shuffle do not. Not for secrets. Not thread-safe.
class Rng {
 public:
  explicit Rng(uint64_t seed);
  // Seeded by the kernel.
  static Rng FromSystem();

  uint64_t Next();
  // Uniform in [0, bound), bound > 0, without modulo bias.
  uint64_t Below(uint64_t bound);
  template <typename T>
  void Shuffle(std::span<T> items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[Below(i)]);
  }

 private:
  uint64_t state_[4];
};

// Fills with bytes from the kernel's generator; for keys and ids. Aborts if the kernel has none.
void SecureRandom(std::span<uint8_t> out);

}  // namespace dsec
