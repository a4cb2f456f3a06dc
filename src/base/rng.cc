// SPDX-License-Identifier: Apache-2.0
#include "base/rng.h"

#include <sys/random.h>

#include "base/check.h"

namespace dsec {
namespace {

uint64_t SplitMix(uint64_t& state) {
  state += 0x9e3779b97f4a7c15ULL;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

uint64_t Rotl(uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }

}  // namespace

Rng::Rng(uint64_t seed) {
  for (uint64_t& word : state_) word = SplitMix(seed);
}

Rng Rng::FromSystem() {
  uint8_t bytes[8];
  SecureRandom(bytes);
  uint64_t seed = 0;
  for (uint8_t byte : bytes) seed = seed << 8 | byte;
  return Rng(seed);
}

uint64_t Rng::Next() {
  const uint64_t result = Rotl(state_[1] * 5, 7) * 9;
  const uint64_t t = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= t;
  state_[3] = Rotl(state_[3], 45);
  return result;
}

uint64_t Rng::Below(uint64_t bound) {
  DSEC_CHECK(bound > 0);
  const uint64_t threshold = (0 - bound) % bound;
  for (;;) {
    const uint64_t value = Next();
    if (value >= threshold) return value % bound;
  }
}

void SecureRandom(std::span<uint8_t> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = getrandom(out.data() + done, out.size() - done, 0);
    DSEC_CHECK(got > 0);
    done += static_cast<size_t>(got);
  }
}

}  // namespace dsec
