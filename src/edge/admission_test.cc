// SPDX-License-Identifier: Apache-2.0
#include "edge/admission.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

namespace dsec::edge {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class AdmissionTest : public testing::Test {
 protected:
  Admission Make(AdmissionOptions options) {
    return Admission(
        options, [this]() -> Result<HostMeters> { return meters_; }, clock_, [this] { ++freed_; });
  }

  FakeClock clock_;
  int freed_ = 0;
  HostMeters meters_{.memory_total_bytes = 1000 * kMiB,
                     .memory_available_bytes = 1000 * kMiB,
                     .disk_free_bytes = 1000 * kMiB};
};

TEST_F(AdmissionTest, FullNode_RefusesUntilAPlaceComesBack) {
  auto admission = Make({.max_sandboxes = 2, .memory_reserve_bytes = 1, .disk_reserve_bytes = 0});
  auto first = admission.TryEnter();
  auto second = admission.TryEnter();
  ASSERT_TRUE(first.ok() && second.ok());
  const auto refused = admission.TryEnter();
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.error().reason(), "capacity.count");
  first->Release();
  EXPECT_EQ(freed_, 1);
  EXPECT_EQ(admission.live(), 1u);
  EXPECT_TRUE(admission.TryEnter().ok());
}

TEST_F(AdmissionTest, Memory_CountsCreatesThatDoNotShowYet) {
  auto admission = Make({.memory_reserve_bytes = 900 * kMiB,
                         .memory_per_create_bytes = 50 * kMiB,
                         .disk_reserve_bytes = 0});
  auto first = admission.TryEnter();
  auto second = admission.TryEnter();
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.memory");
  first->Settle();
  first->Settle();
  EXPECT_TRUE(admission.TryEnter().ok());
}

TEST_F(AdmissionTest, Meters_AreReadAgainWhenOld) {
  auto admission = Make({.memory_reserve_bytes = 500 * kMiB});
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.disk");
  meters_.disk_free_bytes = 2000 * kMiB;
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.disk");
  clock_.Advance(std::chrono::milliseconds(26));
  EXPECT_TRUE(admission.TryEnter().ok());
  meters_.psi_memory_some_avg10 = 61;
  clock_.Advance(std::chrono::milliseconds(26));
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.pressure");
}

TEST_F(AdmissionTest, Measure_IsWhatTheNextEntryGoesBy) {
  auto admission = Make({.memory_reserve_bytes = 0, .disk_reserve_bytes = 900 * kMiB});
  EXPECT_TRUE(admission.TryEnter().ok());
  meters_.disk_free_bytes = 100 * kMiB;
  EXPECT_EQ(admission.Measure()->disk_free_bytes, 100 * kMiB);
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.disk");
}

TEST_F(AdmissionTest, ReadmittedSandbox_CountsEvenWhenFull) {
  auto admission = Make({.max_sandboxes = 1, .memory_reserve_bytes = 0, .disk_reserve_bytes = 0});
  const auto a = admission.Readmit();
  auto b = admission.Readmit();
  EXPECT_EQ(admission.live(), 2u);
  b = Admission::Place();
  EXPECT_EQ(admission.live(), 1u);
  EXPECT_EQ(admission.TryEnter().error().reason(), "capacity.count");
}

TEST_F(AdmissionTest, UnreadableMeter_IsUnavailableNotFull) {
  Admission admission(
      {}, []() -> Result<HostMeters> { return Error(Code::kInternal, "x", "boom"); }, clock_,
      [] {});
  EXPECT_EQ(admission.TryEnter().error().code(), Code::kUnavailable);
}

class HostMetersTest : public testing::Test {
 protected:
  HostMetersTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dsec-proc-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    std::filesystem::create_directory(root_ + "/pressure");
    Write("meminfo", "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:    1234 kB\n");
  }
  ~HostMetersTest() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(root_ + "/" + name) << text;
  }

  std::string root_;
};

TEST_F(HostMetersTest, Files_AreRead) {
  Write("pressure/memory", "some avg10=1.25 avg60=0.00 avg300=0.00 total=1\nfull avg10=9.00\n");
  Write("pressure/cpu", "some avg10=50.00 avg60=0.00 avg300=0.00 total=1\n");
  const auto meters = ReadHostMeters(root_, {root_, "/"});
  ASSERT_TRUE(meters.ok()) << meters.error().ToString();
  EXPECT_EQ(meters->memory_total_bytes, 24000000ull * 1024);
  EXPECT_EQ(meters->memory_available_bytes, 1234ull * 1024);
  EXPECT_EQ(meters->psi_memory_some_avg10, 1.25);
  EXPECT_EQ(meters->psi_cpu_some_avg10, 50);
  EXPECT_GT(meters->disk_free_bytes, 0u);
}

TEST_F(HostMetersTest, KernelWithoutPsi_ReadsAsNoPressure) {
  EXPECT_EQ(ReadHostMeters(root_, {})->psi_memory_some_avg10, 0);
}

TEST_F(HostMetersTest, BrokenFile_IsAnError) {
  Write("pressure/memory", "nonsense\n");
  EXPECT_EQ(ReadHostMeters(root_, {}).error().reason(), "capacity.unknown");
  EXPECT_FALSE(ReadHostMeters(root_ + "/none", {}).ok());
  EXPECT_FALSE(ReadHostMeters("/proc", {root_ + "/none"}).ok());
}

}  // namespace
}  // namespace dsec::edge
