// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "runtime/shards.h"
#include "store/store.h"

// What every Store must do, whatever stands behind it. An implementation instantiates it with
//   INSTANTIATE_TEST_SUITE_P(Sqlite, StoreConformance, testing::Values(MakeSqliteHarness));
// in one test binary.
namespace dsec::store::testing {

// A store under test, empty at first.
class Harness {
 public:
  virtual ~Harness() = default;
  virtual Store& store() = 0;
  // Lets this much time pass for leases: by a clock of its own, or by waiting.
  virtual void Pass(std::chrono::milliseconds time) = 0;
  // The connection, or the process, is lost and comes back.
  virtual void Reopen() = 0;
};
using MakeHarness = std::function<std::unique_ptr<Harness>(runtime::Executor)>;

class StoreConformance : public ::testing::TestWithParam<MakeHarness> {
 protected:
  StoreConformance() : harness_(GetParam()(shards_.at(0))) {}
  ~StoreConformance() override { harness_.reset(); }

  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    return runtime::BlockOn(shards_.at(1), std::move(task));
  }
  static runtime::Deadline Soon() { return runtime::Deadline::After(std::chrono::seconds(20)); }
  static runtime::Deadline Now() { return runtime::Deadline::After(std::chrono::milliseconds(5)); }
  Store& store() { return harness_->store(); }
  Revision Put(const std::string& key, const std::string& value, LeaseId lease = 0);
  std::optional<std::string> Value(const std::string& key);

  runtime::Shards shards_{2};
  std::unique_ptr<Harness> harness_;
};

}  // namespace dsec::store::testing
