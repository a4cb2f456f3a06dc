// SPDX-License-Identifier: Apache-2.0
// Devices, from files as the driver makes them. No GPU is needed, and none was ever used.
#include "fn/gpu.h"

#include <filesystem>
#include <fstream>

#include "fn/testing/fn_fixture.h"

namespace dsec::fn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Device files and /proc of a driver below a folder.
class FakeDriver {
 public:
  explicit FakeDriver(std::string root) : root_(std::move(root)) {
    for (const char* name : {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "null"}) {
      Make("dev/" + std::string(name));
    }
  }
  void Gpu(int index) { Make("dev/nvidia" + std::to_string(index)); }
  // A compute instance; the minors are those of its two device files.
  void Mig(const std::string& gpu, const std::string& gi, const std::string& ci, int gi_minor,
           int ci_minor) {
    const std::string dir = "proc/driver/nvidia/capabilities/" + gpu + "/mig/" + gi;
    Access(dir, gi_minor);
    Access(dir + "/" + ci, ci_minor);
  }
  void Remove(const std::string& path) { std::filesystem::remove(root_ + "/" + path); }
  std::string Path(const std::string& path) const { return root_ + "/" + path; }

 private:
  void Make(const std::string& path, const std::string& text = "") {
    std::filesystem::create_directories(std::filesystem::path(Path(path)).parent_path());
    std::ofstream(Path(path)) << text;
  }
  void Access(const std::string& dir, int minor) {
    Make(dir + "/access", "DeviceFileMinor: " + std::to_string(minor) +
                              "\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
    Make("dev/nvidia-caps/nvidia-cap" + std::to_string(minor));
  }
  const std::string root_;
};

class GpuTest : public testing::FnFixture {
 protected:
  FakeDriver driver_{dir_.path() + "/root"};
};

TEST(GpuKind, Names_AreWholeMigOrAProfile) {
  for (const char* good : {"whole", "mig", "1g.5gb", "3g.40gb", "7g.80gb", "1c.3g.20gb",
                           "1g.10gb+me", "1g.12gb+gfx"}) {
    EXPECT_TRUE(IsGpuKind(good)) << good;
  }
  for (const char* bad : {"", "g.5gb", "1g", "1g.5", "1g.5gb ", "1g.5gb+", "1g.5gb+A", "a100"}) {
    EXPECT_FALSE(IsGpuKind(bad)) << bad;
  }
}

TEST(GpuProfiles, Text_IsStrict) {
  const auto profiles = ParseMigProfiles("gpu0/gi1=1g.10gb,gpu1/gi2=3g.40gb");
  ASSERT_TRUE(profiles.ok());
  EXPECT_EQ(profiles->at("gpu1/gi2"), "3g.40gb");
  EXPECT_TRUE(ParseMigProfiles("")->empty());
  for (const char* bad : {"gpu0=1g.10gb", "gpu0/gi1", "gpu0/gi1=whole", "gpu0/gi1=x",
                          "gpu0/gi1=1g.5gb,gpu0/gi1=1g.5gb", ",gpu0/gi1=1g.5gb"}) {
    EXPECT_EQ(ParseMigProfiles(bad).error().field(), "fn_mig_profiles") << bad;
  }
}

TEST_F(GpuTest, Inventory_ReadsWholeGpusAndInstances) {
  driver_.Gpu(10);
  driver_.Gpu(2);
  driver_.Mig("gpu2", "gi1", "ci0", 21, 22);
  driver_.Mig("gpu2", "gi9", "ci0", 93, 94);
  driver_.Mig("gpu2", "gi9", "ci1", 93, 95);
  driver_.Remove("dev/nvidia-caps/nvidia-cap95");
  const GpuInventory found = ReadGpus(dir_.path() + "/root", {{"gpu2/gi1", "1g.10gb"}});
  ASSERT_EQ(found.devices.size(), 3);
  EXPECT_EQ(found.devices[0].name, "gpu2/gi1/ci0");
  EXPECT_EQ(found.devices[0].kind, "1g.10gb");
  EXPECT_THAT(found.devices[0].files,
              ElementsAre(driver_.Path("dev/nvidia2"), driver_.Path("dev/nvidiactl"),
                          driver_.Path("dev/nvidia-uvm"), driver_.Path("dev/nvidia-uvm-tools"),
                          driver_.Path("dev/nvidia-caps/nvidia-cap21"),
                          driver_.Path("dev/nvidia-caps/nvidia-cap22")));
  EXPECT_EQ(found.devices[1].kind, "mig");
  EXPECT_EQ(found.devices[2].name, "gpu10");
  EXPECT_EQ(found.devices[2].kind, "whole");
  ASSERT_EQ(found.problems.size(), 1);
  EXPECT_THAT(found.problems[0], HasSubstr("gpu2/gi9/ci1"));
}

TEST_F(GpuTest, NoDriver_NoDevices) {
  const GpuInventory found = ReadGpus(dir_.path() + "/none", {});
  EXPECT_THAT(found.devices, IsEmpty());
  EXPECT_THAT(found.problems, IsEmpty());
}

v1::FnCall GpuCall(uint32_t count, const std::string& kind, bool shared, const std::string& code) {
  v1::FnCall call;
  call.set_type("plain");
  call.set_code(code);
  call.mutable_gpu()->set_count(count);
  call.mutable_gpu()->set_kind(kind);
  call.mutable_gpu()->set_shared(shared);
  return call;
}

TEST_F(GpuTest, ExclusiveDevice_HasOneHolderAndIsGivenBackOnEveryPath) {
  driver_.Gpu(0);
  Start();
  auto first = Begin(GpuCall(1, "", false, "wait one"));
  backend_.AwaitWaiting("one", 1);
  EXPECT_THAT(backend_.runs()[0].devices,
              ElementsAre(driver_.Path("dev/nvidia-uvm"), driver_.Path("dev/nvidia-uvm-tools"),
                          driver_.Path("dev/nvidia0"), driver_.Path("dev/nvidiactl")));
  auto second = Begin(GpuCall(1, "whole", true, "wait two"));
  // Others are not held up by it.
  EXPECT_EQ(Run("plain", "echo a").verdict(), v1::FN_OK);
  Tick();
  EXPECT_EQ(Gauge("dsec_fn_gpu_waiting"), 1);
  EXPECT_EQ(Count("dsec_fn_gpus", "kind=\"whole\""), 1);
  EXPECT_EQ(Count("dsec_fn_gpus_free", "kind=\"whole\""), 0);
  EXPECT_EQ(backend_.runs().size(), 2);
  backend_.Release("one");
  EXPECT_TRUE(first.get().ok());
  backend_.AwaitWaiting("two", 1);
  backend_.Release("two");
  EXPECT_GT(second.get()->queue_usec(), 0);
  // Each of these ends another way.
  EXPECT_EQ(Call(GpuCall(1, "", false, "die"))->reason(), "fn.poison");
  EXPECT_EQ(Call(GpuCall(1, "", false, "exit 3"))->verdict(), v1::FN_WRONG_EXIT);
  runtime::Running running;
  auto cancelled = BeginCancellable(GpuCall(1, "", false, "wait three"), &running);
  backend_.AwaitWaiting("three", 1);
  auto waits = Begin(GpuCall(1, "", false, "echo a"));
  running.Cancel();
  EXPECT_EQ(cancelled.get().error().code(), Code::kCancelled);
  EXPECT_EQ(waits.get()->verdict(), v1::FN_OK);
}

TEST_F(GpuTest, SharedDevice_HasSoManyHoldersAndNoExclusiveOne) {
  options_.gpu_shared_max = 2;
  driver_.Gpu(0);
  driver_.Gpu(1);
  Start();
  std::vector<std::future<Result<v1::FnResult>>> calls;
  for (int i = 0; i < 2; ++i) calls.push_back(Begin(GpuCall(1, "", true, "wait go")));
  backend_.AwaitWaiting("go", 2);
  const auto runs = backend_.runs();
  EXPECT_EQ(runs[0].devices, runs[1].devices) << "the shared one is filled first";
  calls.push_back(Begin(GpuCall(1, "", false, "wait go")));
  backend_.AwaitWaiting("go", 3);
  EXPECT_NE(backend_.runs()[2].devices, runs[0].devices);
  // Both are taken: one by two who share, one by one alone.
  auto third = Begin(GpuCall(1, "", true, "echo a"));
  auto both = Begin(GpuCall(2, "", false, "echo b"));
  Settle();
  EXPECT_EQ(backend_.runs().size(), 3);
  backend_.Release("go");
  for (auto& call : calls) EXPECT_TRUE(call.get().ok());
  EXPECT_EQ(third.get()->verdict(), v1::FN_OK);
  EXPECT_EQ(both.get()->verdict(), v1::FN_OK);
}

TEST_F(GpuTest, CompileOnCpu_HoldsNoDevice) {
  driver_.Gpu(0);
  options_.pools.workers_max = 1;
  Start();
  auto holder = Begin(GpuCall(1, "", false, "wait go"));
  backend_.AwaitWaiting("go", 1);
  v1::FnCall call = GpuCall(1, "", false, "cc echo compiled\necho ran");
  call.set_type("compiled");
  auto compiled = Begin(call);
  backend_.Release("go");
  EXPECT_EQ(holder.get()->verdict(), v1::FN_OK);
  EXPECT_EQ(compiled.get()->run().stdout().data(), "ran\n");
  const auto runs = backend_.runs();
  ASSERT_EQ(runs.size(), 3);
  EXPECT_THAT(runs[1].devices, IsEmpty());
  EXPECT_EQ(runs[2].devices.size(), 4);
}

TEST_F(GpuTest, MoreThanTheNodeHas_IsRefused) {
  driver_.Gpu(0);
  Start();
  auto result = Call(GpuCall(2, "", false, ""));
  ASSERT_FALSE(result.ok());
  EXPECT_EQ(result.error().code(), Code::kFailedPrecondition);
  EXPECT_EQ(result.error().field(), "gpu.count");
  EXPECT_EQ(Call(GpuCall(1, "1g.10gb", false, "")).error().field(), "gpu.kind");
  bool told = false;
  for (const v1::Capability& line : service_->Capabilities()) {
    told = told || (line.name() == "fn.gpu.whole" && line.used() == "1" && line.ok());
  }
  EXPECT_TRUE(told);
}

}  // namespace
}  // namespace dsec::fn
