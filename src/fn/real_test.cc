// SPDX-License-Identifier: Apache-2.0
// The engine over workers of the real backend.
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "base/rng.h"
#include "fn/fn_service.h"
#include "sandbox/testing/fncall_fixture.h"

namespace dsec::fn {
namespace {

using runtime::Deadline;
using std::chrono::seconds;

class FnRealTest : public sandbox::testing::FnCallTest {
 protected:
  void SetUp() override {
    FnCallTest::SetUp();
    if (fncall_ == nullptr) return;
    std::filesystem::create_directories(state_.path() + "/types");
    WriteType("sh", R"({"name": "sh", "environment": {"base": "test-base:1"}, "source": "main.sh",
      "run": {"argv": ["/bin/sh", "{source}", "{args}"]}})");
    WriteType("made", R"({"name": "made", "environment": {"base": "test-base:1"},
      "source": "main.sh", "compile": {"argv": ["/bin/sh", "-c",
        "echo compiling >&2; cp main.sh prog && chmod 755 prog", "{source}"],
        "artifacts": ["prog"]}, "run": {"argv": ["./prog", "{args}"]}})");
    WriteType("gone", R"({"name": "gone", "environment": {"base": "test-base:1"}, "source": "a",
      "compile": {"argv": ["/usr/bin/no-such-compiler", "{source}"]},
      "run": {"argv": ["./prog"]}})");
    FnOptions options;
    options.state_dir = state_.path() + "/state";
    options.types_dirs = {state_.path() + "/types"};
    options.gpu_root = state_.path();
    options.metrics = &registry_;
    options.pools.workers_max = 4;
    fn_shards_ = std::make_unique<runtime::Shards>(2);
    auto opened = FnService::Open(options, *fn_shards_, *fncall_);
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    service_ = std::move(*opened);
    ASSERT_TRUE(service_->Start().ok());
  }
  void TearDown() override {
    if (service_ != nullptr) {
      auto stopped = Wait(service_->Stop(Deadline::After(seconds(30))));
      EXPECT_TRUE(stopped.ok()) << stopped.error().ToString();
      fn_shards_->Stop();
      service_->LetGo();
      fn_shards_.reset();
      service_.reset();
    }
    FnCallTest::TearDown();
  }

  void WriteType(const std::string& name, const std::string& json) {
    std::ofstream(state_.path() + "/types/" + name + ".json") << json;
  }
  template <typename T>
  Result<T> Wait(runtime::Task<T> task) {
    return runtime::BlockOn(fn_shards_->at(0), std::move(task));
  }
  static v1::FnCall CallOf(const std::string& type, const std::string& code) {
    v1::FnCall call;
    call.set_type(type);
    call.set_code(code);
    return call;
  }
  v1::FnResult Call(const v1::FnCall& call) {
    auto result = Wait(service_->Call(call, Deadline::After(seconds(60))));
    EXPECT_TRUE(result.ok()) << result.error().ToString();
    return result.ok() ? *result : v1::FnResult();
  }
  static boost::asio::awaitable<void> Deliver(runtime::Task<v1::FnResult> task,
                                              std::promise<Result<v1::FnResult>> promise) {
    auto result = co_await std::move(task);
    promise.set_value(std::move(result));
  }
  std::future<Result<v1::FnResult>> Begin(const v1::FnCall& call) {
    std::promise<Result<v1::FnResult>> promise;
    auto future = promise.get_future();
    EXPECT_TRUE(runtime::Spawn(
        gate_, fn_shards_->at(0),
        Deliver(service_->Call(call, Deadline::After(seconds(240))), std::move(promise))));
    return future;
  }

  // Every process in a v2 group of this node's workers, whose names begin with f.
  std::vector<int> WorkerPids() const {
    std::vector<int> pids;
    std::error_code error;
    for (std::filesystem::directory_iterator it("/proc", error), end; !error && it != end;
         it.increment(error)) {
      const int pid = std::atoi(it->path().filename().c_str());
      if (pid <= 0) continue;
      std::ifstream groups(it->path() / "cgroup");
      std::string line;
      while (std::getline(groups, line)) {
        if (line.starts_with("0::/dsec-" + Options().node_id.str() + "/f")) pids.push_back(pid);
      }
    }
    return pids;
  }

  os::TempDir state_ = std::move(os::TempDir::Create("dsec-fn")).value();
  metrics::Registry registry_;
  runtime::Gate gate_;
  std::unique_ptr<runtime::Shards> fn_shards_;
  std::unique_ptr<FnService> service_;
};

TEST_F(FnRealTest, Call_HasItsInputArgumentsFilesAndVerdict) {
  v1::FnCall call =
      CallOf("sh", "cat; echo \"$1\"; cat in/a.txt; mkdir out; echo made > out/b; exit 3");
  call.set_stdin(std::string("in\0put", 6));
  call.add_args("a b");
  v1::FnFile& file = *call.add_files();
  file.set_path("in/a.txt");
  file.set_content("file");
  call.add_fetch("out/b");
  call.add_fetch("none");
  const v1::FnResult result = Call(call);
  EXPECT_EQ(result.verdict(), v1::FN_WRONG_EXIT) << result.ShortDebugString();
  EXPECT_EQ(result.run().exit_code(), 3);
  EXPECT_EQ(result.run().stdout().data(), std::string("in\0puta b\nfile", 14));
  ASSERT_EQ(result.files_size(), 1);
  EXPECT_EQ(result.files(0).content(), "made\n");
  ASSERT_EQ(result.missing_size(), 1);
  EXPECT_EQ(result.missing(0), "none");
}

TEST_F(FnRealTest, Compiled_RunsFromTheWorkerAndFromTheCache) {
  v1::FnCall call = CallOf("made", "#!/bin/sh\necho \"ran $1\"");
  call.add_args("x");
  for (const bool cached : {false, true}) {
    const v1::FnResult result = Call(call);
    EXPECT_EQ(result.verdict(), v1::FN_OK) << result.message();
    EXPECT_EQ(result.compile().stderr().data(), "compiling\n");
    EXPECT_EQ(result.run().stdout().data(), "ran x\n");
    EXPECT_EQ(result.compile().cached(), cached);
  }
}

TEST_F(FnRealTest, CompilerGone_IsInfrastructure) {
  const v1::FnResult result = Call(CallOf("gone", "x"));
  EXPECT_EQ(result.verdict(), v1::FN_INFRASTRUCTURE);
  EXPECT_EQ(result.reason(), "fn.environment") << result.message();
}

TEST_F(FnRealTest, TimeLimit_LeavesAWorkerThatRunsTheNext) {
  v1::FnCall call = CallOf("sh", "sleep 60");
  call.mutable_limits()->set_wall_ms(300);
  EXPECT_EQ(Call(call).verdict(), v1::FN_TIME_LIMIT);
  EXPECT_EQ(Call(CallOf("sh", "echo a")).run().stdout().data(), "a\n");
}

TEST_F(FnRealTest, ProcessesKilledAtRandom_EachCallEndsOnceWithWhatIsItsOwn) {
  constexpr int kCalls = 200;
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < kCalls; ++i) {
    calls.push_back(Begin(CallOf("sh", "echo token" + std::to_string(i))));
  }
  // Whatever process of a worker it hits: the runner, the cell's first one, the program.
  Rng rng(11);
  int killed = 0;
  for (int round = 0; round < 40; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::vector<int> pids = WorkerPids();
    if (!pids.empty() && kill(pids[rng.Below(pids.size())], SIGKILL) == 0) ++killed;
  }
  EXPECT_GT(killed, 0);
  int good = 0;
  for (int i = 0; i < kCalls; ++i) {
    const auto result = calls[static_cast<size_t>(i)].get();
    ASSERT_TRUE(result.ok()) << result.error().ToString();
    if (result->verdict() == v1::FN_OK) {
      EXPECT_EQ(result->run().stdout().data(), "token" + std::to_string(i) + "\n");
      ++good;
    } else {
      EXPECT_TRUE(result->verdict() == v1::FN_INFRASTRUCTURE ||
                  (result->verdict() == v1::FN_SIGNALED && result->run().signal() == SIGKILL))
          << result->verdict() << result->message();
    }
  }
  EXPECT_GE(good, kCalls - 2 * killed);
  EXPECT_EQ(Call(CallOf("sh", "echo a")).run().stdout().data(), "a\n");
}

}  // namespace
}  // namespace dsec::fn
