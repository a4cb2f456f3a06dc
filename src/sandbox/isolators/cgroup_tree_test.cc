// SPDX-License-Identifier: Apache-2.0
// The three drivers against a directory tree in the kernel's place: which files are written where,
// and how figures are read.

#include "sandbox/isolators/cgroup_tree.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <optional>

#include "os/file.h"

namespace dsec::sandbox {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Fills new directories with control files as the kernel would and removes them with their
// directory.
class FakeCgroupFs : public CgroupFs {
 public:
  Result<void> Make(int parent, const char* name) override {
    DSEC_TRY_VOID(CgroupFs::Make(parent, name));
    DSEC_TRY(const auto dir, os::OpenAt(parent, name, O_RDONLY | O_DIRECTORY));
    char link[64], path[4096] = {};
    std::snprintf(link, sizeof(link), "/proc/self/fd/%d", dir.get());
    if (::readlink(link, path, sizeof(path) - 1) < 0) return os::ErrnoError("test", link);
    for (const auto& [hierarchy, files] : files_) {
      if (std::string_view(path).find(hierarchy) == std::string_view::npos) continue;
      for (const char* file : files) DSEC_TRY_VOID(os::CreateFile(dir.get(), file, "", 0644));
    }
    return Ok();
  }
  Result<void> Remove(int parent, const char* name) override {
    // What a directory's files are does not count for rmdir of a cgroup; directories below it do.
    const auto dir = os::OpenAt(parent, name, O_RDONLY | O_DIRECTORY);
    if (!dir.ok()) return Ok();
    for (const auto& [hierarchy, files] : files_) {
      for (const char* file : files) ::unlinkat(dir->get(), file, 0);
    }
    return CgroupFs::Remove(parent, name);
  }
  std::map<std::string, std::vector<const char*>> files_;
};

const std::vector<const char*> kV2Core = {
    "cgroup.procs",           "cgroup.events",    "cgroup.kill", "cgroup.subtree_control",
    "cgroup.max.descendants", "cgroup.max.depth", "cpu.stat"};
const std::vector<const char*> kV2All = {
    "cgroup.procs",           "cgroup.events",    "cgroup.kill",   "cgroup.subtree_control",
    "cgroup.max.descendants", "cgroup.max.depth", "cpu.stat",      "cpu.max",
    "cpu.max.burst",          "cpu.weight",       "memory.max",    "memory.swap.max",
    "memory.current",         "memory.peak",      "memory.events", "pids.max",
    "pids.current",           "pids.events"};
const std::vector<const char*> kV1Memory = {
    "cgroup.procs",          "memory.limit_in_bytes",     "memory.memsw.limit_in_bytes",
    "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"};
const std::vector<const char*> kV1Cpu = {"cgroup.procs",     "cpu.cfs_period_us",
                                         "cpu.cfs_quota_us", "cpu.cfs_burst_us",
                                         "cpu.shares",       "cpu.stat"};
const std::vector<const char*> kV1Pids = {"cgroup.procs", "pids.max", "pids.current",
                                          "pids.events"};

class FakeCgroups : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_.emplace(os::TempDir::Create("dsec-cg-").value());
    Dir("/proc");
    Dir("/proc/self");
    Dir("/sys");
    Dir("/sys/fs");
    Dir("/sys/fs/cgroup");
  }
  std::string Path(const std::string& path) const { return dir_->path() + path; }
  void Dir(const std::string& path) { ASSERT_EQ(::mkdir(Path(path).c_str(), 0755), 0) << path; }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(Path(path)) << text;
  }
  std::string Read(const std::string& path) const {
    std::ifstream file(Path(path));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void Hybrid() {
    for (const char* name : {"memory", "cpu,cpuacct", "pids", "unified"})
      Dir(std::string("/sys/fs/cgroup/") + name);
    Write("/sys/fs/cgroup/unified/cgroup.controllers", "hugetlb\n");
    Write("/proc/self/mountinfo",
          "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
          "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
          "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup "
          "rw,cpu,cpuacct\n"
          "39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n"
          "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
    fs_.files_ = {{"/memory/", kV1Memory},
                  {"/cpu,cpuacct/", kV1Cpu},
                  {"/pids/", kV1Pids},
                  {"/unified/", kV2Core}};
  }
  void V2() {
    Write("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma\n");
    Write("/sys/fs/cgroup/cgroup.subtree_control", "");
    Write("/proc/self/mountinfo",
          "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
          "41 31 0:38 /part /mnt/part rw,relatime - cgroup2 cgroup2 rw\n"
          "42 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
    fs_.files_ = {{"/sys/fs/cgroup/", kV2All}};
  }
  void Open() {
    auto opened = CgroupTree::Open({"dsec-n1", dir_->path(), &fs_});
    ASSERT_TRUE(opened.ok()) << opened.error().ToString();
    tree_ = std::move(*opened);
  }
  static v1::Limits SomeLimits() {
    v1::Limits limits;
    limits.set_memory_bytes(256 << 20);
    limits.set_cpu_millis(1500);
    limits.set_pids(100);
    return limits;
  }

  std::optional<os::TempDir> dir_;
  FakeCgroupFs fs_;
  std::unique_ptr<CgroupTree> tree_;
  const SlotName slot_{3, 77};
};

TEST_F(FakeCgroups, V2_LimitsAreOnTheCode) {
  V2();
  Open();
  EXPECT_EQ(tree_->driver(), "v2");
  auto made = tree_->Make(slot_, 0, 0);
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  EXPECT_FALSE(made->memory.valid());
  EXPECT_THAT(made->v1_procs, IsEmpty());
  const std::string slot = "/sys/fs/cgroup/dsec-n1/s3-77";
  for (const char* dir : {"/sys/fs/cgroup", "/sys/fs/cgroup/dsec-n1"}) {
    EXPECT_EQ(Read(std::string(dir) + "/cgroup.subtree_control"), "+memory +cpu +pids");
  }
  EXPECT_EQ(Read(slot + "/cgroup.subtree_control"), "+memory +cpu +pids");
  EXPECT_EQ(Read(slot + "/code/cgroup.subtree_control"), "+memory +cpu +pids")
      << "execs have counters of their own";
  EXPECT_EQ(Read(slot + "/cgroup.max.depth"), "2");
  ASSERT_TRUE(tree_->SetLimits(slot_, SomeLimits()).ok());
  EXPECT_EQ(Read(slot + "/code/memory.max"), "268435456");
  EXPECT_EQ(Read(slot + "/code/memory.swap.max"), "0");
  EXPECT_EQ(Read(slot + "/code/cpu.max"), "150000 100000");
  EXPECT_EQ(Read(slot + "/code/cpu.max.burst"), "150000");
  EXPECT_EQ(Read(slot + "/code/cpu.weight"), "150");
  EXPECT_EQ(Read(slot + "/code/pids.max"), "101") << "init is not counted";
  EXPECT_EQ(Read(slot + "/memory.max"), "") << "the agent is not bounded with the code";
}

TEST_F(FakeCgroups, V2_UsageIsRead) {
  V2();
  Open();
  ASSERT_TRUE(tree_->Make(slot_, 0, 0).ok());
  const std::string code = "/sys/fs/cgroup/dsec-n1/s3-77/code";
  Write(code + "/cpu.stat",
        "usage_usec 1234\nuser_usec 1000\nsystem_usec 234\nnr_throttled 2\nthrottled_usec 99\n");
  Write(code + "/memory.current", "4096\n");
  Write(code + "/memory.peak", "8192\n");
  Write(code + "/memory.events", "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n");
  Write(code + "/pids.current", "5\n");
  Write(code + "/pids.events", "max 4\n");
  v1::Usage usage;
  ASSERT_TRUE(tree_->ReadUsage(slot_, usage).ok());
  EXPECT_EQ(usage.cpu_usec(), 1234u);
  EXPECT_EQ(usage.throttled_usec(), 99u);
  EXPECT_EQ(usage.memory_bytes(), 4096u);
  EXPECT_EQ(usage.memory_peak_bytes(), 8192u);
  EXPECT_EQ(usage.oom_kills(), 2u);
  EXPECT_EQ(usage.pids(), 4u);
  EXPECT_EQ(usage.pids_denied(), 4u);
}

TEST_F(FakeCgroups, Hybrid_LimitsAreOnTheV1Groups) {
  Hybrid();
  Open();
  EXPECT_EQ(tree_->driver(), "hybrid");
  auto made = tree_->Make(slot_, 0, 0);
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  EXPECT_EQ(made->v1_procs.size(), 3u);
  EXPECT_TRUE(made->memory.valid() && made->pids.valid() && made->cpu.valid());
  ASSERT_TRUE(tree_->SetLimits(slot_, SomeLimits()).ok());
  const std::string cg = "/sys/fs/cgroup/", s = "/dsec-n1/s3-77/";
  EXPECT_EQ(Read(cg + "memory" + s + "memory.limit_in_bytes"), "268435456");
  EXPECT_EQ(Read(cg + "memory" + s + "memory.memsw.limit_in_bytes"), "268435456")
      << "swap is in the bound";
  EXPECT_EQ(Read(cg + "cpu,cpuacct" + s + "cpu.cfs_quota_us"), "150000");
  EXPECT_EQ(Read(cg + "cpu,cpuacct" + s + "cpu.cfs_period_us"), "100000");
  EXPECT_EQ(Read(cg + "cpu,cpuacct" + s + "cpu.cfs_burst_us"), "150000");
  EXPECT_EQ(Read(cg + "cpu,cpuacct" + s + "cpu.shares"), "1536");
  EXPECT_EQ(Read(cg + "pids" + s + "pids.max"), "101");
  Write(cg + "memory" + s + "memory.usage_in_bytes", "4096\n");
  Write(cg + "memory" + s + "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n");
  Write(cg + "cpu,cpuacct" + s + "cpu.stat",
        "nr_periods 1\nnr_throttled 1\nthrottled_time 5000000\n");
  Write(cg + "unified" + s + "code/cpu.stat", "usage_usec 77\n");
  v1::Usage usage;
  ASSERT_TRUE(tree_->ReadUsage(slot_, usage).ok());
  EXPECT_EQ(usage.oom_kills(), 6u);
  EXPECT_EQ(usage.throttled_usec(), 5000u);
  EXPECT_EQ(usage.cpu_usec(), 77u);
  EXPECT_EQ(usage.pids(), 0u);
}

TEST_F(FakeCgroups, HybridWithoutSwapAccounting_DoesNotSwapAndSaysSo) {
  Hybrid();
  fs_.files_["/memory/"] = {"cgroup.procs", "memory.limit_in_bytes", "memory.swappiness"};
  Open();
  ASSERT_TRUE(tree_->Make(slot_, 0, 0).ok());
  ASSERT_TRUE(tree_->SetLimits(slot_, SomeLimits()).ok());
  EXPECT_EQ(Read("/sys/fs/cgroup/memory/dsec-n1/s3-77/memory.swappiness"), "0");
  bool said = false;
  for (const v1::Capability& item : tree_->Capabilities()) {
    said |= item.name() == "cgroup.memory" &&
            item.detail().find("swap is not accounted") != std::string::npos;
  }
  EXPECT_TRUE(said);
}

TEST_F(FakeCgroups, ControllersOnBothVersions_EachWhereItIs) {
  Hybrid();
  Write("/sys/fs/cgroup/unified/cgroup.controllers", "memory pids\n");
  Write("/sys/fs/cgroup/unified/cgroup.subtree_control", "");
  fs_.files_["/unified/"] = kV2All;
  Open();
  ASSERT_TRUE(tree_->Make(slot_, 0, 0).ok());
  ASSERT_TRUE(tree_->SetLimits(slot_, SomeLimits()).ok());
  EXPECT_EQ(Read("/sys/fs/cgroup/unified/cgroup.subtree_control"), "+memory +pids");
  EXPECT_EQ(Read("/sys/fs/cgroup/unified/dsec-n1/s3-77/code/memory.max"), "268435456");
  EXPECT_EQ(Read("/sys/fs/cgroup/cpu,cpuacct/dsec-n1/s3-77/cpu.cfs_quota_us"), "150000");
  EXPECT_NE(::access(Path("/sys/fs/cgroup/memory/dsec-n1").c_str(), F_OK), 0) << "not in use";
}

TEST_F(FakeCgroups, MissingController_IsNamedUnenforceable) {
  V2();
  Write("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu memory\n");
  Open();
  EXPECT_EQ(tree_->MemoryUnenforceable(), "");
  EXPECT_THAT(tree_->PidsUnenforceable(), HasSubstr("no pids controller"));
}

TEST_F(FakeCgroups, OldKernel_IsRefusedWithTheReason) {
  V2();
  fs_.files_["/sys/fs/cgroup/"] = {"cgroup.procs", "cgroup.subtree_control"};
  auto opened = CgroupTree::Open({"dsec-n1", dir_->path(), &fs_});
  ASSERT_FALSE(opened.ok());
  EXPECT_EQ(opened.error().reason(), "cgroup.unusable");
  EXPECT_THAT(opened.error().message(), HasSubstr("cgroup.kill"));
}

TEST_F(FakeCgroups, Remove_TakesExecsAndForeignDirectoriesOfTheAgentAlong) {
  V2();
  Open();
  ASSERT_TRUE(tree_->Make(slot_, 0, 0).ok());
  const std::string slot = "/sys/fs/cgroup/dsec-n1/s3-77";
  Dir(slot + "/code/e1");
  Dir(slot + "/planted");
  Dir(slot + "/planted/below");
  Write(slot + "/cgroup.events", "populated 0\n");
  EXPECT_THAT(*tree_->List(), ElementsAre(slot_));
  const auto removed = tree_->Remove(slot_, MonoTime::max());
  ASSERT_TRUE(removed.ok()) << removed.error().ToString();
  EXPECT_THAT(*tree_->List(), IsEmpty());
  EXPECT_TRUE(tree_->Remove(slot_, MonoTime::max()).ok()) << "again";
  auto dying = tree_->Kill(slot_);
  ASSERT_TRUE(dying.ok()) << "of what is gone";
  EXPECT_TRUE(*CgroupTree::WaitGone(*dying, MonoTime::max()));
}

TEST_F(FakeCgroups, List_TakesNothingForItsOwnThatIsNot) {
  V2();
  Open();
  for (const char* name :
       {"s1-2", "s01-2", "s1-2x", "t1-2", "s1", "s-1", "s1--2", "s1-99999999999999999999"}) {
    Dir(std::string("/sys/fs/cgroup/dsec-n1/") + name);
  }
  Write("/sys/fs/cgroup/dsec-n1/s5-6", "a file");
  EXPECT_THAT(*tree_->List(), ElementsAre(SlotName{1, 2}));
}

TEST(SlotName, Parse_IsTheInverseOfStr) {
  const SlotName name{4094, 1764432000000000};
  EXPECT_EQ(SlotName::Parse(name.str()), name);
  const SlotName worker{3, 5, SlotKind::kWorker};
  EXPECT_EQ(worker.str(), "f3-5");
  EXPECT_EQ(SlotName::Parse("f3-5"), worker);
  EXPECT_NE(SlotName::Parse("s3-5"), worker);
  EXPECT_EQ(SlotName::Parse("s4294967296-1"), std::nullopt);
  EXPECT_EQ(SlotName::Parse(""), std::nullopt);
}

}  // namespace
}  // namespace dsec::sandbox
