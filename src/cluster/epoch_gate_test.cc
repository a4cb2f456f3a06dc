// SPDX-License-Identifier: Apache-2.0
#include "cluster/epoch_gate.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "base/fault.h"
#include "base/log.h"
#include "cluster/node_record.h"
#include "os/file.h"
#include "runtime/shards.h"

namespace dsec::cluster {
namespace {

using runtime::Deadline;
using runtime::Task;

Deadline Soon() { return Deadline::After(std::chrono::seconds(20)); }

// A node whose sandboxes are files of a folder.
class GateTest : public ::testing::Test {
 protected:
  GateTest() {
    log::Options quiet;
    quiet.level = log::Level::kError;
    log::Configure(std::move(quiet));
    dir_.emplace(*os::TempDir::Create("dsec-gate-"));
    boxes_ = dir_->path() + "/boxes";
    std::filesystem::create_directory(boxes_);
  }
  ~GateTest() override {
    fault::DisarmAll();
    Close();
  }

  void Open(std::chrono::milliseconds fence_takes = {}) {
    shards_ = std::make_unique<runtime::Shards>(1);
    auto fence = [this, fence_takes](std::string, Deadline) -> Task<void> {
      ++fences_;
      return [](std::string boxes, std::chrono::milliseconds takes) -> Task<void> {
        auto slept = co_await runtime::SleepUntil(Deadline::After(takes));
        if (!slept.ok()) co_return slept;
        for (const auto& entry : std::filesystem::directory_iterator(boxes)) {
          DSEC_CO_FAULT_POINT("test.fence");
          std::filesystem::remove(entry.path());
        }
        co_return Ok();
      }(boxes_, fence_takes);
    };
    auto gate = FencingGate::Open(path(), shards_->at(0), fence);
    ASSERT_TRUE(gate.ok()) << gate.error().ToString();
    gate_ = *std::move(gate);
  }
  void Close() {
    if (gate_ != nullptr) {
      (void)runtime::BlockOn(shards_->at(0), [](FencingGate& gate) -> Task<void> {
        co_await gate.Stop();
        co_return Ok();
      }(*gate_));
    }
    if (shards_ != nullptr) shards_->Stop();
    gate_.reset();
    shards_.reset();
  }
  Result<void> Check(uint64_t epoch) {
    return runtime::BlockOn(shards_->at(0), gate_->Check(epoch, Soon()));
  }
  Result<void> Resume() { return runtime::BlockOn(shards_->at(0), gate_->Resume(Soon())); }
  uint64_t epoch() const { return gate_->epoch(); }
  std::string path() const { return dir_->path() + "/epoch"; }
  void MakeBoxes(int count) {
    for (int i = 0; i < count; ++i) std::ofstream(boxes_ + fmt::format("/{}", i)) << "x";
  }
  size_t Boxes() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(boxes_),
                                             std::filesystem::directory_iterator()));
  }

  std::optional<os::TempDir> dir_;
  std::string boxes_;
  std::unique_ptr<runtime::Shards> shards_;
  std::unique_ptr<FencingGate> gate_;
  std::atomic<int> fences_ = 0;
};

TEST_F(GateTest, HigherEpoch_EndsWhatWasBeforeAndIsKept) {
  MakeBoxes(3);
  Open();
  EXPECT_EQ(gate_->epoch(), 0u);
  ASSERT_TRUE(Check(1).ok());
  EXPECT_EQ(Boxes(), 0u);
  MakeBoxes(2);
  ASSERT_TRUE(Check(1).ok());  // the same: nothing happens
  EXPECT_EQ(Boxes(), 2u);
  auto stale = Check(0);
  ASSERT_FALSE(stale.ok());
  EXPECT_EQ(stale.error().reason(), "edge.epoch_stale");
  EXPECT_EQ(stale.error().code(), Code::kFailedPrecondition);
  ASSERT_TRUE(Check(7).ok());
  EXPECT_EQ(Boxes(), 0u);
  EXPECT_EQ(fences_, 2);
  Close();
  Open();
  EXPECT_EQ(gate_->epoch(), 7u);
  EXPECT_EQ(Check(6).error().reason(), "edge.epoch_stale");
  EXPECT_TRUE(Check(7).ok());
  EXPECT_EQ(fences_, 2);
}

TEST_F(GateTest, CallsDuringAFence_WaitForIt) {
  Open(std::chrono::milliseconds(200));
  ASSERT_TRUE(Check(1).ok());
  MakeBoxes(2);
  auto all = runtime::BlockOn(shards_->at(0), [](FencingGate& gate) -> Task<void> {
    runtime::Gate both;
    const auto here = co_await boost::asio::this_coro::executor;
    std::vector<Result<void>> results(3, Error(Code::kInternal, "x", ""));
    for (int i = 0; i < 3; ++i) {
      runtime::Spawn(
          both, here,
          [](FencingGate& of, Result<void>& to, uint64_t epoch) -> boost::asio::awaitable<void> {
            to = co_await of.Check(epoch, Soon());
          }(gate, results[static_cast<size_t>(i)], i == 2 ? 1 : 2));
    }
    co_await both.Close();
    EXPECT_TRUE(results[0].ok());
    EXPECT_TRUE(results[1].ok());
    EXPECT_EQ(results[2].error().reason(), "edge.epoch_stale");
    EXPECT_TRUE(gate.Serves(2));
    co_return Ok();
  }(*gate_));
  EXPECT_TRUE(all.ok());
  EXPECT_EQ(fences_, 2);
  EXPECT_EQ(Boxes(), 0u);
}

TEST_F(GateTest, FenceThatFails_ServesNobodyUntilItSucceeds) {
  Open();
  ASSERT_TRUE(Check(1).ok());
  MakeBoxes(2);
  ASSERT_TRUE(fault::Arm("test.fence=error:EIO").ok());
  auto failed = Check(2);
  ASSERT_FALSE(failed.ok());
  EXPECT_EQ(failed.error().reason(), "edge.fencing");
  EXPECT_EQ(Check(1).error().reason(), "edge.epoch_stale");
  fault::DisarmAll();
  EXPECT_TRUE(Check(2).ok());
  EXPECT_EQ(Boxes(), 0u);
}

TEST_F(GateTest, DamagedFile_IsAnError) {
  for (const char* text : {"", "dsec-epoch 1\n3\n", "dsec-epoch 1\n3\n2\n", "dsec-epoch 1\nx\n0\n",
                           "dsec-epoch 2\n1\n0\n", "dsec-epoch 1\n1\n0\nmore"}) {
    std::ofstream(path()) << text;
    runtime::Shards shards(1);
    auto gate = FencingGate::Open(path(), shards.at(0), nullptr);
    ASSERT_FALSE(gate.ok()) << text;
    EXPECT_EQ(gate.error().reason(), "edge.epoch_damaged");
  }
}

// Each moment at which the daemon may be killed.
class GateKill : public GateTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(GateKill, NextStart_GoesOnWithTheFence) {
  MakeBoxes(6);
  const pid_t child = fork();  // before any thread of this test
  if (child == 0) {
    Open();
    if (!Check(1).ok()) _exit(10);
    MakeBoxes(6);
    if (!fault::Arm(GetParam()).ok()) _exit(11);
    (void)Check(2);
    _exit(12);  // the point was not reached
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;

  Open();
  EXPECT_EQ(gate_->epoch(), 1u);
  EXPECT_FALSE(gate_->Serves(1));  // it must not go on with what it had
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(Boxes(), 0u);
  EXPECT_EQ(gate_->epoch(), 2u);
  EXPECT_EQ(Check(1).error().reason(), "edge.epoch_stale");
  MakeBoxes(1);
  EXPECT_TRUE(Check(2).ok());
  EXPECT_EQ(Boxes(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Moments, GateKill,
                         ::testing::Values("epoch.after_intent=kill", "test.fence=kill",
                                           "epoch.after_fence=kill"));

TEST_F(GateTest, Stop_EndsAFenceThatTheNextStartGoesOnWith) {
  Open();
  ASSERT_TRUE(Check(1).ok());
  Close();
  MakeBoxes(2);
  Open(std::chrono::hours(1));
  std::promise<Result<void>> checked;
  boost::asio::co_spawn(
      shards_->at(0),
      [](FencingGate& gate, std::promise<Result<void>>& to) -> boost::asio::awaitable<void> {
        to.set_value(co_await gate.Check(2, Deadline::After(std::chrono::hours(1))));
      }(*gate_, checked),
      boost::asio::detached);
  const Deadline late = Soon();
  while (fences_ < 2 && !late.Expired()) std::this_thread::yield();
  ASSERT_EQ(fences_, 2);
  const auto start = std::chrono::steady_clock::now();
  (void)runtime::BlockOn(shards_->at(0), [](FencingGate& gate) -> Task<void> {
    co_await gate.Stop();
    co_return Ok();
  }(*gate_));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_EQ(checked.get_future().get().error().reason(), "edge.fencing");
  Close();
  EXPECT_EQ(Boxes(), 2u);
  Open();
  EXPECT_EQ(gate_->epoch(), 1u);
  EXPECT_FALSE(gate_->Serves(1));
  ASSERT_TRUE(Resume().ok());
  EXPECT_EQ(Boxes(), 0u);
  EXPECT_EQ(gate_->epoch(), 2u);
}

TEST_F(GateTest, AnEpochThatNoOtherCouldFollowIsRefused) {
  Open();
  ASSERT_TRUE(Check(1).ok());
  MakeBoxes(2);
  for (const uint64_t epoch : {kMaxEpoch + 1, UINT64_MAX}) {
    const auto refused = Check(epoch);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().reason(), "edge.epoch");
  }
  EXPECT_EQ(Boxes(), 2u);
  EXPECT_EQ(epoch(), 1u);
  EXPECT_TRUE(Check(2).ok());
}

}  // namespace
}  // namespace dsec::cluster
