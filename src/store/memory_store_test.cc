// SPDX-License-Identifier: Apache-2.0
// The store of the simulations is a store: the same suite as the real ones.
#include "store/testing/memory_store.h"

#include <atomic>

#include "store/testing/conformance.h"

namespace dsec::store::testing {
namespace {

using std::chrono::milliseconds;

class MovedClock final : public Clock {
 public:
  MonoTime Mono() const override { return MonoTime(milliseconds(ms_.load())); }
  WallTime Wall() const override { return WallTime(milliseconds(ms_.load())); }
  void Advance(milliseconds by) { ms_ += by.count(); }

 private:
  std::atomic<int64_t> ms_ = 3'600'000;
};

class MemoryHarness final : public Harness {
 public:
  Store& store() override { return store_; }
  void Pass(milliseconds time) override { clock_.Advance(time); }
  void Reopen() override {}

 private:
  MovedClock clock_;
  MemoryStore store_{{.clock = &clock_}};
};

std::unique_ptr<Harness> MakeMemoryHarness(const runtime::Executor&) {
  return std::make_unique<MemoryHarness>();
}

INSTANTIATE_TEST_SUITE_P(Memory, StoreConformance, ::testing::Values(MakeMemoryHarness));

}  // namespace
}  // namespace dsec::store::testing
