// SPDX-License-Identifier: Apache-2.0
// Speed of building layers against plain mkfs.erofs, and of mounting them. Needs root.
// DSEC_BENCH_TREE names the folder to build from (default /usr/lib/python3).
#include <benchmark/benchmark.h>
#include <fcntl.h>

#include <cstdio>
#include <cstdlib>

#include "base/check.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "os/file.h"

namespace dsec::image {
namespace {

std::string Tree() {
  const char* tree = std::getenv("DSEC_BENCH_TREE");
  return tree != nullptr ? tree : "/usr/lib/python3";
}

// One store with one layer of the tree, for all benchmarks.
struct Fixture {
  os::TempDir folder = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store = *LayerStore::Open(folder.path() + "/layers");
  BuildReport report;

  Fixture() {
    auto built = Build(SourceKind::kDirectory, Tree());
    if (!built.ok()) {
      std::fprintf(stderr, "%s\n", built.error().ToString().c_str());
      std::abort();
    }
    report = *built;
    const std::string tar =
        fmt::format("tar -C {} --numeric-owner -cf {}/a.tar .", Tree(), folder.path());
    DSEC_CHECK(std::system(tar.c_str()) == 0);
  }

  Result<BuildReport> Build(SourceKind source, const std::string& path) {
    BuildRequest request;
    request.source = source;
    request.path = path;
    return store->Build(request, nullptr);
  }
};

Fixture& Shared() {
  static Fixture fixture;
  return fixture;
}

void CountBytes(benchmark::State& state) {
  const auto bytes = static_cast<int64_t>(Shared().report.layer.content_bytes);
  state.SetBytesProcessed(bytes * state.iterations());
}

void PlainMkfs(benchmark::State& state) {
  const std::string command = fmt::format(
      "cd {} && mkfs.erofs --quiet --blobdev=plain.blob --chunksize=65536 -Enoinline_data "
      "plain.meta {}",
      Shared().folder.path(), Tree());
  for (auto _ : state) DSEC_CHECK(std::system(command.c_str()) == 0);
  CountBytes(state);
}
BENCHMARK(PlainMkfs)->Unit(benchmark::kMillisecond)->UseRealTime();

void UnpackTarAndMkfs(benchmark::State& state) {
  const std::string command = fmt::format(
      "cd {} && rm -rf t && mkdir t && tar -C t -xf a.tar && mkfs.erofs --quiet "
      "--blobdev=plain.blob --chunksize=65536 "
      "-Enoinline_data plain.meta t && rm -rf t",
      Shared().folder.path());
  for (auto _ : state) DSEC_CHECK(std::system(command.c_str()) == 0);
  CountBytes(state);
}
BENCHMARK(UnpackTarAndMkfs)->Unit(benchmark::kMillisecond)->UseRealTime();

void Build(benchmark::State& state, SourceKind source) {
  Fixture& shared = Shared();
  const std::string path = source == SourceKind::kTar ? shared.folder.path() + "/a.tar" : Tree();
  BuildReport last;
  for (auto _ : state) {
    auto report = shared.Build(source, path);
    DSEC_CHECK(report.ok());
    last = *report;
  }
  CountBytes(state);
  state.counters["read_ms"] = static_cast<double>(last.read_ms);
  state.counters["write_ms"] = static_cast<double>(last.write_ms);
  state.counters["publish_ms"] = static_cast<double>(last.publish_ms);
}
BENCHMARK_CAPTURE(Build, Directory, SourceKind::kDirectory)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK_CAPTURE(Build, Tar, SourceKind::kTar)->Unit(benchmark::kMillisecond)->UseRealTime();

// A mount of a layer that this process has verified before.
void Mount(benchmark::State& state) {
  LayerMounts mounts(*Shared().store);
  for (auto _ : state) benchmark::DoNotOptimize((*mounts.Acquire(Shared().report.layer.id))->fd());
}
BENCHMARK(Mount)->Unit(benchmark::kMicrosecond);

// The first mount: with the digest of the metadata.
void MountFirst(benchmark::State& state) {
  for (auto _ : state) {
    LayerMounts mounts(*Shared().store);
    benchmark::DoNotOptimize((*mounts.Acquire(Shared().report.layer.id))->fd());
  }
  state.counters["meta_bytes"] = static_cast<double>(Shared().report.layer.meta_bytes);
}
BENCHMARK(MountFirst)->Unit(benchmark::kMicrosecond);

void AcquireMounted(benchmark::State& state) {
  LayerMounts mounts(*Shared().store);
  const auto held = *mounts.Acquire(Shared().report.layer.id);
  for (auto _ : state) benchmark::DoNotOptimize((*mounts.Acquire(Shared().report.layer.id))->fd());
}
BENCHMARK(AcquireMounted)->Unit(benchmark::kNanosecond);

void ResolveName(benchmark::State& state) {
  BuildRequest request;
  request.path = Tree();
  request.name = "bench:1";
  DSEC_CHECK(Shared().store->Build(request, nullptr).ok());
  for (auto _ : state) DSEC_CHECK(Shared().store->Resolve("bench:1", LayerKind::kBase).ok());
}
BENCHMARK(ResolveName)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace dsec::image

BENCHMARK_MAIN();
