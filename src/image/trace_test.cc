// SPDX-License-Identifier: Apache-2.0
// Traces of first reads: their text, recording them from the kernel, keeping them beside layers and
// reading ahead what they name. Needs root, tracefs and file-backed EROFS (Linux 6.12).
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/fault.h"
#include "base/rng.h"
#include "image/layer_mounts.h"
#include "image/layer_store.h"
#include "image/layer_trace.h"
#include "image/touch_recorder.h"
#include "os/file.h"
#include "os/mount.h"

namespace dsec::image {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using ::testing::ElementsAre;

constexpr uint64_t kKib = 1024, kMib = 1024 * kKib;

LayerTrace TraceOf(std::vector<FirstTouch> parts) { return {std::move(parts)}; }

// Lines, for messages that show what differs.
std::string Text(const std::vector<FirstTouch>& parts) { return TraceOf(parts).Lines(); }

TEST(RangeSetTest, RandomRanges_GiveWhatABitmapGives) {
  Rng rng(7);
  for (int run = 0; run < 200; ++run) {
    RangeSet set;
    std::vector<bool> seen(64);
    for (int i = 0; i < 20; ++i) {
      const uint64_t begin = rng.Below(64), end = begin + rng.Below(65 - begin);
      std::vector<bool> fresh(64);
      uint64_t last = 0;
      for (const auto& [from, to] : set.Add(begin, end)) {
        EXPECT_LT(from, to);
        EXPECT_GE(from, last);
        last = to;
        for (uint64_t at = from; at < to; ++at) fresh[at] = true;
      }
      for (uint64_t at = 0; at < 64; ++at) {
        EXPECT_EQ(fresh[at], at >= begin && at < end && !seen[at]);
        if (fresh[at]) seen[at] = true;
      }
    }
  }
}

TEST(LayerTraceTest, Text_HasOneSpellingAndBounds) {
  const auto trace = TraceOf({{"usr/bin/a b", 4096, 8192}, {"x", 0, 4096}});
  const std::string text = "dsec-first-touch 1\nusr/bin/a b\t4096\t8192\nx\t0\t4096\n";
  EXPECT_EQ(trace.Encode(), text);
  const auto parsed = LayerTrace::Parse(text);
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->Encode(), text);
  EXPECT_EQ(parsed->bytes(), 12288U);
  // What the builder takes.
  ASSERT_TRUE(ParseFirstTouch(trace.Lines()).ok());
  const std::string head = "dsec-first-touch 1\n";
  for (const std::string& bad : {std::string(),
                                 std::string("dsec-first-touch 2\nx\t0\t4096\n"),
                                 head + "x\t0\t4096",
                                 head + "x\t0\n",
                                 head + "x\n",
                                 head + "\n",
                                 head + "x\t0\t0\n",
                                 head + "x\t1\t4096\n",
                                 head + "x\t0\t4095\n",
                                 head + "x\t00\t4096\n",
                                 head + "x\t-0\t4096\n",
                                 head + "x\t0\t4096\t1\n",
                                 head + "/x\t0\t4096\n",
                                 head + "../x\t0\t4096\n",
                                 head + "a/../x\t0\t4096\n",
                                 head + "a//x\t0\t4096\n",
                                 head + "\t0\t4096\n",
                                 head + "a\x01\t0\t4096\n",
                                 head + "x\t140737488355328\t4096\n",
                                 head + "x\t0\t18446744073709547520\n"}) {
    const auto refused = LayerTrace::Parse(bad);
    ASSERT_FALSE(refused.ok()) << bad;
    EXPECT_EQ(refused.error().reason(), "layer.bad_trace");
  }
}

TEST(LayerTraceTest, Bound_KeepsTheBeginningAndParses) {
  LayerTrace trace;
  for (size_t i = 0; i < kMaxTraceParts + 10; ++i)
    trace.parts.push_back({"f" + std::to_string(i), 0, 4096});
  trace.parts.insert(trace.parts.begin() + 3, {"odd\tname", 0, 4096});
  EXPECT_TRUE(trace.Bound());
  EXPECT_EQ(trace.parts.size(), kMaxTraceParts);
  EXPECT_EQ(trace.parts[3].path, "f3");
  EXPECT_FALSE(trace.Bound());
  EXPECT_TRUE(LayerTrace::Parse(trace.Encode()).ok());
  LayerTrace large = TraceOf({{"a", 0, kMaxTraceBytes}, {"b", 0, 4096}});
  EXPECT_TRUE(large.Bound());
  EXPECT_EQ(Text(large.parts), "a\t0\t8589934592\n");
}

TEST(LayerTraceTest, Merge_FirstOrderWins) {
  const auto merged =
      LayerTrace::Merge(TraceOf({{"b", 4096, 4096}, {"a", 0, 8192}}),
                        TraceOf({{"a", 4096, 8192}, {"c", 0, 4096}, {"b", 0, 12288}}));
  EXPECT_EQ(Text(merged.parts),
            "b\t4096\t4096\na\t0\t8192\na\t8192\t4096\nc\t0\t4096\nb\t0\t4096\nb\t8192\t4096\n");
}

TEST(LayerTraceTest, Plan_ReadsEachByteOnceInLargeRequests) {
  EXPECT_EQ(Text(PlanReads(TraceOf({{"a", 8192, 4096},
                                    {"b", 0, 4096},
                                    {"a", 0, 4096},
                                    {"a", 1 * kMib, 4096},
                                    {"c", 0, 3 * kMib}}),
                           kMib)),
            "a\t0\t12288\nb\t0\t4096\na\t1048576\t4096\nc\t0\t1048576\nc\t1048576\t1048576\n"
            "c\t2097152\t1048576\n");
  Rng rng(3);
  for (int run = 0; run < 200; ++run) {
    LayerTrace trace;
    std::set<std::pair<std::string, uint64_t>> wanted, planned;
    for (int i = 0; i < 30; ++i) {
      FirstTouch part{std::string(1, static_cast<char>('a' + rng.Below(2))),
                      rng.Below(600) * kTracePage, (1 + rng.Below(40)) * kTracePage};
      for (uint64_t at = 0; at < part.length; at += kTracePage)
        wanted.emplace(part.path, part.offset + at);
      trace.parts.push_back(std::move(part));
    }
    uint64_t total = 0;
    for (const FirstTouch& part : PlanReads(trace, 256 * kKib)) {
      EXPECT_LE(part.length, 256 * kKib);
      for (uint64_t at = 0; at < part.length; at += kTracePage)
        planned.emplace(part.path, part.offset + at);
      total += part.length;
    }
    EXPECT_TRUE(std::ranges::includes(planned, wanted));
    EXPECT_EQ(total, planned.size() * kTracePage) << "a byte is read twice";
  }
}

// Which bytes of a file are in the page cache, as a trace has them.
std::vector<FirstTouch> Cached(int mount, const std::string& path) {
  std::vector<FirstTouch> found;
  const auto file = os::OpenAt(mount, path.c_str(), O_RDONLY);
  struct stat status;
  if (!file.ok() || ::fstat(file->get(), &status) != 0) return found;
  struct {
    uint64_t offset, length;
  } range{0, kTracePage};
  for (; range.offset < static_cast<uint64_t>(status.st_size); range.offset += kTracePage) {
    uint64_t answer[5] = {};
    if (::syscall(451, file->get(), &range, answer, 0) != 0) return {{"cachestat", 0, 0}};
    if (answer[0] == 0) continue;
    if (!found.empty() && found.back().offset + found.back().length == range.offset) {
      found.back().length += kTracePage;
    } else {
      found.push_back({path, range.offset, kTracePage});
    }
  }
  return found;
}

void Read(int mount, const std::string& path, uint64_t offset, size_t length) {
  const auto file = os::OpenAt(mount, path.c_str(), O_RDONLY);
  ASSERT_TRUE(file.ok()) << file.error().ToString();
  std::vector<char> buffer(length);
  ASSERT_EQ(::pread(file->get(), buffer.data(), length, static_cast<off_t>(offset)),
            static_cast<ssize_t>(length));
}

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root";
    auto store = LayerStore::Open(Root());
    ASSERT_TRUE(store.ok()) << store.error().ToString();
    store_ = *std::move(store);
  }
  void TearDown() override {
    fault::DisarmAll();
    EXPECT_THAT(Instances(), ElementsAre());
  }

  std::string Root() const { return folder_.path() + "/layers"; }

  // "big" of 3 MiB, "dir/small" of 10,000 bytes, "dir/other" of 64 KiB.
  LayerId Build(const std::string& salt = "") {
    const std::string tree = folder_.path() + "/tree";
    fs::create_directories(tree + "/dir");
    Rng rng(11);
    const auto write = [&](const std::string& name, size_t size) {
      std::string data(size, '\0');
      for (char& c : data) c = static_cast<char>(rng.Below(256));
      std::ofstream(tree + "/" + name, std::ios::binary) << data << salt;
    };
    write("big", 3 * kMib);
    write("dir/small", 10'000);
    write("dir/other", 64 * kKib);
    BuildRequest request;
    request.path = tree;
    const auto built = store_->Build(request, nullptr);
    EXPECT_TRUE(built.ok()) << built.error().ToString();
    return built.ok() ? built->layer.id : LayerId();
  }

  LayerMountOptions Options() const {
    LayerMountOptions options{.cache_dir = folder_.path() + "/copies",
                              .patience = milliseconds(10'000)};
    // A shared machine may wait for its disk for other reasons.
    options.prefetch.psi_io_max = 200;
    options.prefetch.psi_memory_max = 200;
    options.prefetch.memory_available_min = 0;
    return options;
  }

  static std::vector<std::string> Instances() {
    // The host need not have it mounted.
    auto context = os::FsContext::Open("tracefs");
    EXPECT_TRUE(context.ok());
    const auto tracefs = std::move(*context).Mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
    EXPECT_TRUE(tracefs.ok());
    std::vector<std::string> found;
    for (const auto& entry :
         fs::directory_iterator(fmt::format("/proc/self/fd/{}/instances", tracefs->get()))) {
      const std::string name = entry.path().filename();
      if (name.starts_with("dsec-sb-ttrace-")) found.push_back(name);
    }
    return found;
  }

  // A recording of one layer that has just been mounted apart.
  struct Recording {
    std::shared_ptr<const MountedLayer> layer;
    std::unique_ptr<TouchRecorder> recorder;
    LayerTrace Trace() const {
      const auto touches = recorder->Read();
      EXPECT_TRUE(touches.ok()) << touches.error().ToString();
      EXPECT_EQ(touches->lost, 0U);
      return *NameTouches(layer->fd(), touches->devices[0]);
    }
  };
  Result<Recording> Record(LayerMounts& mounts, const LayerId& id) {
    DSEC_TRY(const auto layers, mounts.AcquireApart({id}));
    struct stat status;
    EXPECT_EQ(::fstat(layers[0]->fd(), &status), 0);
    DSEC_TRY(auto recorder, TouchRecorder::Begin(NewSandboxId(NodeId("ttrace"), Clock::System()),
                                                 {status.st_dev}));
    return Recording{layers[0], std::move(recorder)};
  }

  os::TempDir folder_ = *os::TempDir::Create("dsec-timg-");
  std::unique_ptr<LayerStore> store_;
};

TEST_F(TraceTest, Recording_IsExactInOrderAndRanges) {
  const LayerId id = Build();
  LayerMounts mounts(Root(), Options());
  const auto warm = mounts.Acquire(id);
  ASSERT_TRUE(warm.ok()) << warm.error().ToString();
  Read((*warm)->fd(), "big", 0, 3 * kMib);  // what others have cached does not count
  const auto recording = Record(mounts, id);
  ASSERT_TRUE(recording.ok()) << recording.error().ToString();
  const int mount = recording->layer->fd();
  Read((*warm)->fd(), "dir/other", 0, 64 * kKib);
  Read(mount, "dir/small", 5000, 1);
  Read(mount, "big", 100'000, 20'000);  // pages 24 to 29
  Read(mount, "dir/small", 0, 10'000);
  Read(mount, "big", 100'000, 10);
  {
    // As programs and libraries are read.
    const auto file = os::OpenAt(mount, "big", O_RDONLY);
    void* map = ::mmap(nullptr, 3 * kMib, PROT_READ, MAP_PRIVATE, file->get(), 0);
    ASSERT_NE(map, MAP_FAILED);
    const volatile char* bytes = static_cast<const char*>(map);
    static_cast<void>(bytes[2 * kMib]);
    static_cast<void>(bytes[kMib + 8192]);
    ::munmap(map, 3 * kMib);
  }
  EXPECT_EQ(recording->Trace().Lines(),
            "dir/small\t4096\t4096\nbig\t98304\t24576\ndir/small\t0\t4096\ndir/small\t8192\t4096\n"
            "big\t2097152\t4096\nbig\t1056768\t4096\n");
  ASSERT_TRUE(recording->recorder->Stop().ok());
  Read(mount, "dir/other", 0, 100);
  EXPECT_EQ(recording->Trace().parts.size(), 6U);
}

// The kernel writes the names of commands into what is parsed.
TEST_F(TraceTest, HostileCommandName_ForgesNothing) {
  const LayerId id = Build();
  LayerMounts mounts(Root(), Options());
  const auto recording = Record(mounts, id);
  ASSERT_TRUE(recording.ok()) << recording.error().ToString();
  char old[16] = {};
  ::prctl(PR_GET_NAME, old);
  for (const char* name : {"a\nb: erofs_rea", ": erofs_readah", "\n\n\n", " erofs_"}) {
    ::prctl(PR_SET_NAME, name);
    static uint64_t page = 0;
    Read(recording->layer->fd(), "big", 2 * kTracePage * page++, 1);
  }
  ::prctl(PR_SET_NAME, old);
  EXPECT_EQ(recording->Trace().Lines(),
            "big\t0\t4096\nbig\t8192\t4096\nbig\t16384\t4096\nbig\t24576\t4096\n");
}

TEST_F(TraceTest, Recordings_AreBoundedInNumber) {
  const LayerId id = Build();
  LayerMounts mounts(Root(), Options());
  std::vector<Recording> all;
  for (size_t i = 0; i < TouchRecorder::kAtOnce; ++i) {
    auto one = Record(mounts, id);
    ASSERT_TRUE(one.ok()) << one.error().ToString();
    all.push_back(*std::move(one));
  }
  EXPECT_EQ(Record(mounts, id).error().reason(), "trace.too_many");
  EXPECT_EQ(Instances().size(), TouchRecorder::kAtOnce);
  // Each records its own mount alone.
  Read(all[1].layer->fd(), "big", 0, 1);
  EXPECT_EQ(all[0].Trace().Lines(), "");
  EXPECT_EQ(all[1].Trace().Lines(), "big\t0\t4096\n");
  all.pop_back();
  EXPECT_TRUE(Record(mounts, id).ok());
}

TEST_F(TraceTest, KilledRecorder_LeavesWhatASweepRemoves) {
  const LayerId id = Build();
  const pid_t child = ::fork();
  if (child == 0) {
    LayerMounts mounts(Root(), Options());
    const auto recording = Record(mounts, id);
    if (recording.ok()) ::raise(SIGKILL);
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  ASSERT_EQ(Instances().size(), 1U);
  LayerMounts mounts(Root(), Options());
  auto live = Record(mounts, id);
  ASSERT_TRUE(live.ok()) << live.error().ToString();
  EXPECT_THAT(*TouchRecorder::Sweep(NodeId("other")), ElementsAre());
  EXPECT_EQ(TouchRecorder::Sweep(NodeId("ttrace"))->size(), 1U);
  EXPECT_EQ(Instances().size(), 1U) << "the recording of this process goes on";
  Read(live->layer->fd(), "big", 0, 1);
  EXPECT_EQ(live->Trace().parts.size(), 1U);
}

TEST_F(TraceTest, Save_ReplacesMergesAndGoesWithTheLayer) {
  const LayerId id = Build();
  EXPECT_FALSE(store_->FindTrace(id.str())->has_value());
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 8192}}), false).ok());
  const auto merged =
      store_->SaveTrace(id, TraceOf({{"dir/small", 0, 4096}, {"big", 0, 12288}}), true);
  ASSERT_TRUE(merged.ok()) << merged.error().ToString();
  EXPECT_EQ(merged->Lines(), "big\t0\t8192\ndir/small\t0\t4096\nbig\t8192\t4096\n");
  EXPECT_EQ((*store_->FindTrace(id.str()))->Lines(), merged->Lines());
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 4096}}), false).ok());
  EXPECT_EQ((*store_->FindTrace(id.str()))->Lines(), "big\t0\t4096\n");
  EXPECT_TRUE(*store_->RemoveTrace(id.str()));
  EXPECT_FALSE(*store_->RemoveTrace(id.str()));
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 4096}}), false).ok());
  ASSERT_TRUE(store_->Remove(id.str()).ok());
  EXPECT_FALSE(fs::exists(Root() + "/blobs/" + HexOf(id)));
  EXPECT_EQ(store_->SaveTrace(id, TraceOf({{"big", 0, 4096}}), false).error().reason(),
            "layer.not_found");
  EXPECT_TRUE(fs::is_empty(Root() + "/tmp"));
}

TEST_F(TraceTest, KilledSave_LeavesTheOldTrace) {
  const LayerId id = Build();
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 4096}}), false).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    auto store = LayerStore::Open(Root());
    if (store.ok() && fault::Arm("layer.trace.before_rename=kill").ok())
      static_cast<void>((*store)->SaveTrace(id, TraceOf({{"dir/small", 0, 4096}}), false));
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ((*store_->FindTrace(id.str()))->Lines(), "big\t0\t4096\n");
  EXPECT_FALSE(fs::is_empty(Root() + "/tmp"));
  ASSERT_TRUE(LayerStore::Open(Root()).ok());
  EXPECT_TRUE(fs::is_empty(Root() + "/tmp"));
}

TEST_F(TraceTest, Mount_ReadsAheadWhatTheTraceNamesAndNothingElse) {
  const LayerId id = Build();
  ASSERT_TRUE(store_
                  ->SaveTrace(id,
                              TraceOf({{"dir/small", 8192, 4096},  // the file ends within the page
                                       {"big", 128 * kKib, 40 * kKib},
                                       {"no/such", 0, 4096},
                                       {"dir", 0, 4096},
                                       {"big", 2 * kMib, kMib}}),
                              false)
                  .ok());
  LayerMounts mounts(Root(), Options());
  const auto layer = mounts.Acquire(id);
  ASSERT_TRUE(layer.ok()) << layer.error().ToString();
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(Text(Cached((*layer)->fd(), "big")), "big\t131072\t40960\nbig\t2097152\t1048576\n");
  EXPECT_EQ(Text(Cached((*layer)->fd(), "dir/small")), "dir/small\t8192\t4096\n");
  EXPECT_EQ(Text(Cached((*layer)->fd(), "dir/other")), "");
  const auto figures = mounts.prefetched();
  EXPECT_EQ(figures.layers, 1U);
  EXPECT_EQ(figures.read_bytes, 40 * kKib + kMib + 10'000 - 8192);
  EXPECT_EQ(figures.present_bytes, 0U);
  EXPECT_EQ(figures.waiting_bytes, 0U);
  EXPECT_EQ(figures.dropped_bytes, 2 * 4096U) << "what leads to no file";
}

TEST_F(TraceTest, NoTraceDamagedTraceAndNone_MountAllTheSame) {
  const LayerId id = Build();
  const std::string path = Root() + "/blobs/" + HexOf(id) + "/" + kTraceName;
  const auto mount = [&](const LayerMountOptions& options) {
    LayerMounts mounts(Root(), options);
    const auto layer = mounts.Acquire(id);
    EXPECT_TRUE(layer.ok()) << layer.error().ToString();
    EXPECT_TRUE(mounts.Settle());
    return mounts.prefetched().layers;
  };
  EXPECT_EQ(mount(Options()), 0U);
  for (const std::string& damaged :
       {std::string("nonsense"), std::string(kMaxTraceText + 1, 'x')}) {
    std::ofstream(path, std::ios::binary) << damaged;
    EXPECT_EQ(mount(Options()), 0U);
  }
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(mount(Options()), 0U);
  fs::remove(path);
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 4096}}), false).ok());
  EXPECT_EQ(mount(Options()), 1U);
  LayerMountOptions off = Options();
  off.prefetch.requests = 0;
  EXPECT_EQ(mount(off), 0U);
}

TEST_F(TraceTest, HangingPrefetch_HoldsNobodyElseUp) {
  const LayerId hangs = Build("1"), works = Build("2");
  ASSERT_TRUE(store_->SaveTrace(hangs, TraceOf({{"big", 0, kMib}}), false).ok());
  for (const char* point : {"layer.trace.before_read", "layer.prefetch.before_read"}) {
    const uint64_t fired = fault::Fired(point);
    ASSERT_TRUE(fault::Arm(std::string(point) + "=block*1").ok());
    auto mounts = std::make_unique<LayerMounts>(Root(), Options());
    auto first = mounts->Acquire(hangs);
    ASSERT_TRUE(first.ok()) << first.error().ToString();
    ASSERT_TRUE(fault::WaitFired(point, fired + 1, milliseconds(10'000)));
    const auto second = mounts->Acquire(works);
    ASSERT_TRUE(second.ok()) << second.error().ToString();
    Read((*second)->fd(), "big", 0, 3 * kMib);
    Read((*first)->fd(), "dir/small", 0, 100);
    EXPECT_TRUE(mounts->Acquire(hangs).ok());
    fault::DisarmAll();
    EXPECT_TRUE(mounts->Settle());
    EXPECT_EQ(mounts->prefetched().read_bytes, kMib);
  }
}

TEST_F(TraceTest, LastUse_EndsItsTurn) {
  const LayerId id = Build();
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 3 * kMib}}), false).ok());
  const char* point = "layer.prefetch.before_read";
  LayerMountOptions options = Options();
  options.prefetch.requests = 1;
  LayerMounts mounts(Root(), options);
  const uint64_t fired = fault::Fired(point);
  ASSERT_TRUE(fault::Arm(std::string(point) + "=block*1").ok());
  auto layer = mounts.Acquire(id);
  ASSERT_TRUE(layer.ok()) << layer.error().ToString();
  ASSERT_TRUE(fault::WaitFired(point, fired + 1, milliseconds(10'000)));
  *layer = nullptr;
  EXPECT_EQ(mounts.mounted(), 1U) << "the request that is under way uses it";
  fault::DisarmAll();
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(mounts.mounted(), 0U);
  EXPECT_EQ(mounts.prefetched().read_bytes, kMib);
  EXPECT_EQ(mounts.prefetched().dropped_bytes, 2 * kMib);
  EXPECT_TRUE(mounts.Acquire(id).ok()) << "kept, and in order";
}

TEST_F(TraceTest, Rate_IsBounded) {
  const LayerId id = Build();
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 3 * kMib}}), false).ok());
  LayerMountOptions options = Options();
  options.prefetch.bytes_per_s = 5 * kMib;
  options.prefetch.request_bytes = 512 * kKib;
  LayerMounts mounts(Root(), options);
  const MonoTime begun = Clock::System().Mono();
  const auto layer = mounts.Acquire(id);
  ASSERT_TRUE(layer.ok()) << layer.error().ToString();
  ASSERT_TRUE(mounts.Settle());
  // The first request of six need not wait.
  EXPECT_GE(Clock::System().Mono() - begun, milliseconds(499));
  EXPECT_EQ(mounts.prefetched().read_bytes, 3 * kMib);
}

TEST_F(TraceTest, ShortMemoryAndPressure_HoldBack) {
  const LayerId id = Build();
  ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, kMib}}), false).ok());
  LayerMountOptions options = Options();
  options.patience = milliseconds(2000);
  options.prefetch.proc = folder_.path() + "/proc";
  options.prefetch.memory_available_min = 0.125;
  options.prefetch.psi_memory_max = 10;
  fs::create_directories(options.prefetch.proc + "/pressure");
  // By rename, as the real ones are read whole.
  const auto write = [&](const std::string& name, const std::string& text) {
    const std::string path = options.prefetch.proc + "/" + name;
    std::ofstream(path + ".new") << text;
    fs::rename(path + ".new", path);
  };
  const std::string short_memory =
      "MemTotal: 1000000 kB\nMemFree: 100000 kB\nMemAvailable: 100000 kB\n";
  const std::string enough = "MemTotal: 1000000 kB\nMemFree: 100000 kB\nMemAvailable: 500000 kB\n";
  const auto psi = [](int percent) {
    return fmt::format("some avg10={}.00 avg60=0.00\n", percent);
  };
  for (const auto& [memory, pressure] :
       {std::pair(short_memory, psi(0)), std::pair(enough, psi(11))}) {
    write("meminfo", memory);
    write("pressure/memory", pressure);
    LayerMounts mounts(Root(), options);
    const auto layer = mounts.Acquire(id);
    ASSERT_TRUE(layer.ok()) << layer.error().ToString();
    EXPECT_FALSE(mounts.Settle());
    EXPECT_GT(mounts.prefetched().held_back, 0U);
    EXPECT_EQ(mounts.prefetched().read_bytes, 0U);
    write("meminfo", enough);
    write("pressure/memory", psi(0));
    EXPECT_TRUE(mounts.Settle());
    EXPECT_EQ(mounts.prefetched().read_bytes, kMib);
  }
  // A layer may not take more than its share at all.
  write("meminfo", "MemTotal: 10000 kB\nMemFree: 1600 kB\nMemAvailable: 8000 kB\n");
  LayerMounts mounts(Root(), options);
  const auto layer = mounts.Acquire(id);
  ASSERT_TRUE(layer.ok());
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(mounts.prefetched().read_bytes, 0U);
  EXPECT_EQ(mounts.prefetched().dropped_bytes, kMib);
}

// Of two layers each has its turn.
TEST_F(TraceTest, Layers_TakeTurns) {
  const LayerId one = Build("1"), two = Build("2");
  for (const LayerId& id : {one, two})
    ASSERT_TRUE(store_->SaveTrace(id, TraceOf({{"big", 0, 3 * kMib}}), false).ok());
  LayerMountOptions options = Options();
  options.prefetch.requests = 1;
  LayerMounts mounts(Root(), options);
  const char* point = "layer.prefetch.before_read";
  const uint64_t fired = fault::Fired(point);
  ASSERT_TRUE(fault::Arm(std::string(point) + "=block").ok());
  const auto first = mounts.Acquire(one);
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(fault::WaitFired(point, fired + 1, milliseconds(10'000)));
  const auto second = mounts.Acquire(two);
  ASSERT_TRUE(second.ok());
  while (mounts.prefetched().layers < 2) std::this_thread::yield();
  // Each arming lets one request go and stops the next. The second layer came after the second
  // request of the first one was put in line.
  for (uint64_t request = 2; request <= 4; ++request) {
    ASSERT_TRUE(fault::Arm(std::string(point) + "=block").ok());
    ASSERT_TRUE(fault::WaitFired(point, fired + request, milliseconds(10'000)));
  }
  EXPECT_EQ(Text(Cached((*first)->fd(), "big")), "big\t0\t2097152\n");
  EXPECT_EQ(Text(Cached((*second)->fd(), "big")), "big\t0\t1048576\n");
  // An error ends the turn of its layer alone.
  ASSERT_TRUE(fault::Arm(std::string(point) + "=error:EIO*1").ok());
  ASSERT_TRUE(mounts.Settle());
  EXPECT_EQ(mounts.prefetched().read_bytes, 4 * kMib);
  EXPECT_EQ(mounts.prefetched().dropped_bytes, 2 * kMib);
}

}  // namespace
}  // namespace dsec::image
