// SPDX-License-Identifier: Apache-2.0
// Figures of the FnCall backend alone, on the real kernel, as one JSON object: a trivial native
// call while its worker waits, and how many a second some workers do together. Usage: fncall_bench
// [calls] [workers] [gap in milliseconds]
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

#include "os/file.h"
#include "sandbox/backends/fncall/fncall_backend.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Node {
 public:
  Result<void> Open() {
    DSEC_TRY(auto dir, os::TempDir::Create("dsec-tsb-fnbench-"));
    dir_.emplace(std::move(dir));
    DSEC_TRY_VOID(os::MakeDir(dir_->fd(), "state", 0700));
    options_.node_id = NodeId("tsbfn");
    options_.state_dir = dir_->path() + "/state";
    options_.run_dir = dir_->path() + "/run";
    options_.spawner_path = DSEC_SPAWNER_PATH;
    options_.agent_path = DSEC_AETHER_PATH;
    options_.ids = {0x78000000, 0x7ffe0000, 256};
    options_.slot_pool_size = 0;
    options_.scratch_bytes = 1ull << 30;
    DSEC_TRY(testing::TestLayers* const layers, testing::TestLayers::Get());
    DSEC_TRY(container_, ContainerBackend::Open(options_, layers->store(), layers->mounts()));
    DSEC_TRY(fncall_, FnCallBackend::Open({}, container_->parts(), layers->mounts()));
    return Ok();
  }
  void Close() {
    fncall_.reset();
    container_.reset();
    const auto purged = ContainerBackend::Purge(options_, Clock::System().Mono() + seconds(60));
    if (!purged.ok()) std::fprintf(stderr, "purge: %s\n", purged.error().ToString().c_str());
  }
  Result<std::unique_ptr<FnWorker>> MakeWorker() {
    FnWorkerSpec spec;
    spec.environment.set_base("test-base:1");
    return runtime::BlockOn(
        shards_.at(0), fncall_->MakeWorker(std::move(spec), runtime::Deadline::After(seconds(30))));
  }
  Result<void> Call(FnWorker& worker) {
    FnRun run;
    run.argv = {"/bin/call-guest"};
    DSEC_TRY(run.limits, fncall_->Normalize({}, ""));
    DSEC_TRY(const auto report,
             runtime::BlockOn(shards_.at(0),
                              worker.Run(std::move(run), runtime::Deadline::After(seconds(30)))));
    if (report.step.verdict() == v1::FN_OK && !report.dirty) return Ok();
    return Error(Code::kInternal, "bench.call", v1::FnVerdict_Name(report.step.verdict()));
  }

 private:
  ContainerOptions options_;
  std::optional<os::TempDir> dir_;
  runtime::Shards shards_{1};
  std::unique_ptr<ContainerBackend> container_;
  std::unique_ptr<FnCallBackend> fncall_;
};

double Ms(MonoTime from) {
  return std::chrono::duration<double, std::milli>(Clock::System().Mono() - from).count();
}

Result<void> Main(int calls, int workers, int gap_ms) {
  Node node;
  DSEC_TRY_VOID(node.Open());
  std::vector<double> times;
  {
    DSEC_TRY(const auto worker, node.MakeWorker());
    for (int i = 0; i < calls; ++i) {
      // The next cell is made meanwhile.
      std::this_thread::sleep_for(milliseconds(gap_ms));
      const MonoTime start = Clock::System().Mono();
      DSEC_TRY_VOID(node.Call(*worker));
      times.push_back(Ms(start));
    }
  }
  std::ranges::sort(times);
  std::vector<std::unique_ptr<FnWorker>> many;
  for (int i = 0; i < workers; ++i) {
    DSEC_TRY(auto worker, node.MakeWorker());
    many.push_back(std::move(worker));
  }
  std::atomic<int> left = calls * 4;
  std::atomic<int> failed = 0;
  const MonoTime start = Clock::System().Mono();
  std::vector<std::thread> threads;
  for (const auto& worker : many) {
    threads.emplace_back([&] {
      while (left.fetch_sub(1) > 0) {
        if (!node.Call(*worker).ok()) ++failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double rate = calls * 4 / (Ms(start) / 1000);
  many.clear();
  node.Close();
  if (failed != 0)
    return Error(Code::kInternal, "bench.call", fmt::format("{} failed", failed.load()));
  std::printf(
      "{\"benchmark\": \"fncall\", \"median_ms\": %.3f, \"p99_ms\": %.3f, \"per_second\": %.1f, "
      "\"workers\": %d}\n",
      times[times.size() / 2], times[times.size() * 99 / 100], rate, workers);
  return Ok();
}

}  // namespace
}  // namespace dsec::sandbox

int main(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) {
    return argc > at ? std::max(std::atoi(argv[at]), 1) : otherwise;
  };
  const auto done = dsec::sandbox::Main(number(1, 200), number(2, 4), number(3, 10));
  if (!done.ok()) std::fprintf(stderr, "%s\n", done.error().ToString().c_str());
  return done.ok() ? 0 : 1;
}
