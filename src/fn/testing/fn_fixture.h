// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>

#include "fn/fn_service.h"
#include "fn/testing/scripted_backend.h"
#include "os/file.h"

namespace dsec::fn::testing {

// A clock that tests move while shards read it.
class TestClock final : public Clock {
 public:
  MonoTime Mono() const override {
    return MonoTime(std::chrono::milliseconds(3'600'000 + ms_.load()));
  }
  WallTime Wall() const override {
    return WallTime(std::chrono::milliseconds(1'800'000'000'000 + ms_.load()));
  }
  void Advance(std::chrono::milliseconds by) { ms_ += by.count(); }

 private:
  std::atomic<int64_t> ms_ = 0;
};

// An engine over scripted workers, with the types plain (runs its code), compiled (compiles it to
// ./prog first) and other (plain in another environment).
class FnFixture : public ::testing::Test {
 protected:
  FnFixture();
  ~FnFixture() override;

  void Start();
  // Stop and destroy; Start may follow.
  void Shut();
  // As kill -9: what is under way is dropped.
  void Crash();
  void WriteType(const std::string& name, const std::string& json);

  static v1::FnCall CallOf(const std::string& type, const std::string& code);
  // Runs it to its end.
  Result<v1::FnResult> Call(v1::FnCall call);
  v1::FnResult Run(const std::string& type, const std::string& code);
  // Starts it and gives the result later.
  std::future<Result<v1::FnResult>> Begin(v1::FnCall call);
  // The same; Cancel of what it returns cancels the caller.
  std::future<Result<v1::FnResult>> BeginCancellable(v1::FnCall call, runtime::Running* running);
  template <typename T>
  Result<T> Wait(runtime::Task<T> task) {
    return runtime::BlockOn(shards_->at(0), std::move(task));
  }
  void Tick() { EXPECT_TRUE(Wait(runtime::On(home(), service_->Tick())).ok()); }
  void Advance(std::chrono::milliseconds by) {
    clock_.Advance(by);
    Tick();
  }
  runtime::Executor home() const { return shards_->For("fn"); }
  static runtime::Deadline Soon() { return runtime::Deadline::After(std::chrono::seconds(30)); }
  static void Await(const std::function<bool()>& condition);
  // All calls that were made so far have come as far as they can without anything new.
  void Settle();
  // The one pool whose base is that of the layer.
  v1::FnPoolInfo PoolOf(const std::string& base);
  double Gauge(const std::string& name);
  uint64_t Count(const std::string& name, const std::string& label = "");

  os::TempDir dir_;
  TestClock clock_;
  std::unique_ptr<metrics::Registry> metrics_ = std::make_unique<metrics::Registry>();
  FnOptions options_;
  ScriptedBackend backend_;
  std::vector<std::string> removed_;
  runtime::Gate gate_;
  std::unique_ptr<runtime::Shards> shards_;
  std::unique_ptr<FnService> service_;

 private:
  size_t next_shard_ = 0;
};

}  // namespace dsec::fn::testing
