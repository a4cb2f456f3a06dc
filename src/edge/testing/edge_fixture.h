// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/fault.h"
#include "edge/edge.h"
#include "edge/testing/fake_backend.h"

namespace dsec::edge::testing {

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

// An edge on a fake host with a state folder and a /proc of its own.
class EdgeFixture : public ::testing::Test {
 protected:
  EdgeFixture();
  ~EdgeFixture() override;

  // Starts the edge; its report is in `report`.
  void Start();
  // As kill -9: what is under way is dropped. Start may follow.
  void Crash();
  void Reboot();

  // Runs a call of the edge on a shard and waits for it.
  template <typename T>
  Result<T> Run(runtime::Task<T> task) {
    return runtime::BlockOn(shards_->at(0), std::move(task));
  }
  // Starts it and gives the result later.
  template <typename T>
  std::future<Result<T>> Begin(runtime::Task<T> task) {
    std::promise<Result<T>> promise;
    auto future = promise.get_future();
    EXPECT_TRUE(runtime::Spawn(gate_, shards_->at(next_shard_++ % shards_->size()),
                               Deliver<T>(std::move(task), std::move(promise))));
    return future;
  }
  static runtime::Deadline Soon() { return runtime::Deadline::After(std::chrono::seconds(20)); }

  static v1::CreateRequest CreateRequestOf(const std::string& request_id);
  // A running sandbox.
  std::string Create(const std::string& request_id,
                     const std::function<void(v1::CreateRequest&)>& change = {});
  Result<Created> TryCreate(const v1::CreateRequest& request);
  Result<v1::SandboxView> Delete(const std::string& id, uint64_t grace_ms = 0, bool wait = true);
  v1::SandboxRecord Get(const std::string& id);
  v1::ExecRequest ExecOf(const std::string& op_id, const std::vector<std::string>& argv);
  Result<v1::ExecReply> Exec(const std::string& id, const v1::ExecRequest& request,
                             Attachment* follower = nullptr);
  std::vector<v1::Event> Events(const std::string& id);
  std::vector<std::string> EventTypes(const std::string& id);
  // Moves the clock and lets deadlines act.
  void Advance(std::chrono::milliseconds by);
  // Waits for a state of the record.
  void AwaitState(const std::string& id, v1::State state);
  static void Await(const std::function<bool()>& condition);
  // Nothing of an ended sandbox is left, each has exactly one terminal event, and no event is
  // missing.
  void CheckInvariants();

  std::string dir_;
  TestClock clock_;
  std::unique_ptr<metrics::Registry> metrics_;
  EdgeOptions options_;
  std::unique_ptr<FakeHost> host_ = std::make_unique<FakeHost>();
  StartReport report_;
  runtime::Gate gate_;
  std::unique_ptr<runtime::Shards> shards_;
  std::unique_ptr<FakeBackend> backend_;
  std::unique_ptr<Edge> edge_;

 private:
  template <typename T>
  static boost::asio::awaitable<void> Deliver(runtime::Task<T> task,
                                              std::promise<Result<T>> promise) {
    auto result = co_await std::move(task);
    promise.set_value(std::move(result));
  }
  void WriteProc(const std::string& boot_id);

  size_t next_shard_ = 0;
  int boots_ = 0;
};

}  // namespace dsec::edge::testing
