// SPDX-License-Identifier: Apache-2.0
// Figures of the container backend alone, on the real kernel: phases of a create with slots ready
// and with none, removal, and what a live idle sandbox costs. Usage: container_bench [creates]
// [live]
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <map>
#include <thread>

#include "os/file.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox {
namespace {

using Micros = std::chrono::microseconds;

uint64_t Field(const char* path, std::string_view key) {
  const auto text = os::ReadFile(AT_FDCWD, path, 1 << 20);
  if (!text.ok()) return 0;
  const size_t at = text->find(key);
  if (at == std::string::npos) return 0;
  const size_t digit = text->find_first_of("0123456789", at + key.size());
  uint64_t value = 0;
  std::from_chars(text->data() + digit, text->data() + text->size(), value);
  return value;
}

size_t OpenFds() {
  const auto entries = ListDir(AT_FDCWD, "/proc/self/fd");
  return entries.ok() ? entries->size() : 0;
}

class Node {
 public:
  Result<void> Open(uint32_t pool) {
    DSEC_TRY(auto dir, os::TempDir::Create("dsec-tsb-bench-"));
    dir_.emplace(std::move(dir));
    DSEC_TRY_VOID(os::MakeDir(dir_->fd(), "state", 0700));
    options_.node_id = NodeId("tsbench");
    options_.state_dir = dir_->path() + "/state";
    options_.run_dir = dir_->path() + "/run";
    options_.spawner_path = DSEC_SPAWNER_PATH;
    options_.agent_path = DSEC_AETHER_PATH;
    options_.ids = {0x78000000, 0x7ffe0000, 1500};
    options_.slot_pool_size = pool;
    options_.scratch_bytes = 16ull << 30;
    DSEC_TRY(testing::TestLayers* const layers, testing::TestLayers::Get());
    DSEC_TRY(backend_, ContainerBackend::Open(options_, layers->store(), layers->mounts()));
    while (backend_->ReadySlots() < pool) std::this_thread::yield();
    return Ok();
  }
  void Close() {
    backend_.reset();
    const auto purged =
        ContainerBackend::Purge(options_, Clock::System().Mono() + std::chrono::seconds(60));
    if (!purged.ok()) std::fprintf(stderr, "purge: %s\n", purged.error().ToString().c_str());
    dir_.reset();
  }
  Result<std::shared_ptr<Instance>> Create(v1::SandboxRecord& record) {
    record.set_id(NewSandboxId(options_.node_id, Clock::System()).str());
    record.mutable_spec()->set_base("test-base:1");
    DSEC_TRY_VOID(backend_->Normalize(*record.mutable_spec()));
    auto journal = [](const v1::SandboxRecord&) -> Result<void> { return Ok(); };
    return runtime::BlockOn(
        shards_.at(0),
        backend_->Create(record, journal, runtime::Deadline::After(std::chrono::seconds(30))));
  }
  Result<void> Destroy(const v1::SandboxRecord& record) {
    return runtime::BlockOn(
        shards_.at(0),
        backend_->Destroy(record, runtime::Deadline::After(std::chrono::seconds(30))));
  }
  void AwaitPool(uint32_t count) const {
    while (backend_->ReadySlots() < count) std::this_thread::yield();
  }

 private:
  ContainerOptions options_;
  std::optional<os::TempDir> dir_;
  runtime::Shards shards_{1};
  std::unique_ptr<ContainerBackend> backend_;
};

class Samples {
 public:
  void Add(const std::string& name, uint64_t micros) { values_[name].push_back(micros); }
  void Print(const char* title) {
    std::printf("%s\n", title);
    for (auto& [name, values] : values_) {
      std::ranges::sort(values);
      std::printf("  %-10s p50 %7.3f ms  p99 %7.3f ms\n", name.c_str(),
                  static_cast<double>(values[values.size() / 2]) / 1000,
                  static_cast<double>(values[values.size() * 99 / 100]) / 1000);
    }
  }

 private:
  std::map<std::string, std::vector<uint64_t>> values_;
};

uint64_t Since(MonoTime start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<Micros>(Clock::System().Mono() - start).count());
}

Result<void> MeasureCreates(uint32_t pool, int count, const char* title) {
  Node node;
  DSEC_TRY_VOID(node.Open(pool));
  Samples samples;
  for (int i = 0; i < count; ++i) {
    node.AwaitPool(pool);
    v1::SandboxRecord record;
    MonoTime start = Clock::System().Mono();
    DSEC_TRY(auto instance, node.Create(record));
    samples.Add("create", Since(start));
    for (const v1::PhaseTime& phase : record.phases())
      samples.Add("- " + phase.phase(), phase.micros());
    instance.reset();
    start = Clock::System().Mono();
    DSEC_TRY_VOID(node.Destroy(record));
    samples.Add("destroy", Since(start));
  }
  samples.Print(title);
  node.Close();
  return Ok();
}

Result<void> MeasureLive(int count) {
  Node node;
  DSEC_TRY_VOID(node.Open(0));
  v1::SandboxRecord first;
  DSEC_TRY(auto warm, node.Create(first));
  const uint64_t available = Field("/proc/meminfo", "MemAvailable:");
  const uint64_t rss = Field("/proc/self/status", "VmRSS:");
  const size_t fds = OpenFds();
  std::vector<v1::SandboxRecord> records(static_cast<size_t>(count));
  std::vector<std::shared_ptr<Instance>> instances;
  MonoTime start = Clock::System().Mono();
  for (v1::SandboxRecord& record : records) {
    DSEC_TRY(auto instance, node.Create(record));
    instances.push_back(std::move(instance));
  }
  const double seconds = static_cast<double>(Since(start)) / 1e6;
  const auto each = [count](uint64_t kib) { return static_cast<double>(kib) / 1024 / count; };
  std::printf(
      "live %d: %.2f MiB of host memory, %.4f MiB of daemon RSS, %.2f descriptors each; made one "
      "after the other at %.0f/s\n",
      count, each(available - std::min(available, Field("/proc/meminfo", "MemAvailable:"))),
      each(Field("/proc/self/status", "VmRSS:") - rss),
      static_cast<double>(OpenFds() - fds) / count, count / seconds);
  instances.clear();
  warm.reset();
  records.push_back(first);
  start = Clock::System().Mono();
  for (const v1::SandboxRecord& record : records) DSEC_TRY_VOID(node.Destroy(record));
  std::printf("removed one after the other at %.0f/s\n",
              count / (static_cast<double>(Since(start)) / 1e6));
  node.Close();
  return Ok();
}

Result<void> Main(int creates, int live) {
  DSEC_TRY_VOID(MeasureCreates(16, creates, "slots ready"));
  DSEC_TRY_VOID(MeasureCreates(0, creates, "no slot ready"));
  return MeasureLive(live);
}

}  // namespace
}  // namespace dsec::sandbox

int main(int argc, char** argv) {
  const auto done =
      dsec::sandbox::Main(argc > 1 ? std::atoi(argv[1]) : 100, argc > 2 ? std::atoi(argv[2]) : 300);
  if (!done.ok()) std::fprintf(stderr, "%s\n", done.error().ToString().c_str());
  return done.ok() ? 0 : 1;
}
