// SPDX-License-Identifier: Apache-2.0
#include "spawn/plan.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>

#include "base/rng.h"
#include "os/unique_fd.h"

namespace dsec::spawn {
namespace {

class SlotPlans : public ::testing::Test {
 protected:
  SlotPlans() {
    plan_.agent_uid = 2'000'000;
    plan_.id_base = 3'000'000;
    plan_.listen_fd = plan_.token_fd = plan_.slot_dir_fd = plan_.agent_dir_fd = plan_.init_dir_fd =
        null_.get();
  }
  os::UniqueFd null_{::open("/dev/null", O_RDWR | O_CLOEXEC)};
  SlotPlan plan_;
};

TEST_F(SlotPlans, BadValue_FieldNamed) {
  ASSERT_TRUE(plan_.Validate().ok());
  struct {
    const char* field;
    std::function<void(SlotPlan&)> spoil;
  } const cases[] = {
      {"agent_uid", [](auto& p) { p.agent_uid = 0; }},
      {"agent_uid", [](auto& p) { p.agent_uid = 65534; }},
      {"agent_uid", [](auto& p) { p.agent_uid = 0xffffffff; }},
      {"agent_uid", [](auto& p) { p.agent_uid = p.id_base; }},
      {"agent_uid", [](auto& p) { p.agent_uid = p.id_base + 65535; }},
      {"id_base", [](auto& p) { p.id_base = 0; }},
      {"id_base", [](auto& p) { p.id_base = 65535; }},
      {"id_base", [](auto& p) { p.id_base = 0xffffffff - 65536; }},
      {"listen_fd", [](auto& p) { p.listen_fd = -1; }},
      {"token_fd", [](auto& p) { p.token_fd = 900; }},
      {"init_dir_fd", [](auto& p) { p.init_dir_fd = -1; }},
      {"memory_dir_fd", [](auto& p) { p.memory_dir_fd = 900; }},
      {"v1_procs_fds", [](auto& p) { p.v1_procs_fds = {900}; }},
      {"v1_procs_fds", [](auto& p) { p.v1_procs_fds.assign(17, p.listen_fd); }},
  };
  for (const auto& c : cases) {
    SlotPlan plan = plan_;
    c.spoil(plan);
    auto result = plan.Validate();
    ASSERT_FALSE(result.ok()) << c.field;
    EXPECT_EQ(result.error().field(), c.field);
    EXPECT_EQ(result.error().code(), Code::kInvalidArgument);
  }
  plan_.agent_uid = plan_.id_base + 65536;
  EXPECT_TRUE(plan_.Validate().ok()) << "just past the sandbox's ids";
}

TEST_F(SlotPlans, Encoded_WellFormedWithItsDescriptorsOnly) {
  for (bool v1 : {false, true}) {
    if (v1) {
      plan_.memory_dir_fd = plan_.pids_dir_fd = plan_.cpu_dir_fd = null_.get();
      plan_.v1_procs_fds.assign(7, null_.get());
    }
    std::vector<int> fds;
    wire::Slot slot = plan_.Encode(fds, 1000);
    EXPECT_EQ(fds.size(), v1 ? 15u : 5u);
    EXPECT_TRUE(wire::WellFormed(slot, sizeof(slot), fds.size()));
    EXPECT_FALSE(wire::WellFormed(slot, sizeof(slot), fds.size() - 1));
    EXPECT_FALSE(wire::WellFormed(slot, sizeof(slot) - 1, fds.size()));
  }
}

LaunchPlan GoodLaunch() {
  LaunchPlan plan;
  plan.hostname = "sandbox-1.local";
  plan.hosts = "127.0.0.1 localhost\n";
  plan.resolv_conf = std::string(wire::kMaxResolvConf, '#');
  plan.views = {{"/sys"}, {"/proc/cpuinfo"}};
  plan.rlimits = {{RLIMIT_NOFILE, 1024, 4096}};
  plan.cpus = {0, 63, 64, 1023};
  return plan;
}

TEST(LaunchPlans, BadValue_FieldNamed) {
  ASSERT_TRUE(GoodLaunch().Validate().ok()) << GoodLaunch().Validate().error().ToString();
  struct {
    const char* field;
    std::function<void(LaunchPlan&)> spoil;
  } const cases[] = {
      {"hostname", [](auto& p) { p.hostname = ""; }},
      {"hostname", [](auto& p) { p.hostname = "a b"; }},
      {"hostname", [](auto& p) { p.hostname = "a\nb"; }},
      {"hostname", [](auto& p) { p.hostname.assign(65, 'a'); }},
      {"hosts", [](auto& p) { p.hosts.assign(wire::kMaxHosts + 1, 'a'); }},
      {"resolv_conf", [](auto& p) { p.resolv_conf.assign(wire::kMaxResolvConf + 1, 'a'); }},
      {"shm_size", [](auto& p) { p.shm_size = Bytes(0); }},
      {"shm_inodes", [](auto& p) { p.shm_inodes = 0; }},
      {"views", [](auto& p) { p.views.push_back({"/etc"}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc"}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc/"}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc/../etc/passwd"}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc//stat"}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc/./stat"}); }},
      {"views", [](auto& p) { p.views.push_back({std::string("/proc/a\0b", 9)}); }},
      {"views", [](auto& p) { p.views.push_back({"/proc/" + std::string(64, 'x')}); }},
      {"views", [](auto& p) { p.views.push_back({"/sys"}); }},
      {"views", [](auto& p) { p.views.assign(17, {"/proc/stat"}); }},
      {"rlimits", [](auto& p) { p.rlimits = {{99, 1, 1}}; }},
      {"rlimits", [](auto& p) { p.rlimits = {{-1, 1, 1}}; }},
      {"rlimits", [](auto& p) { p.rlimits = {{RLIMIT_STACK, 2, 1}}; }},
      {"rlimits", [](auto& p) { p.rlimits = {{RLIMIT_NOFILE, 10, 1000}}; }},
      {"rlimits", [](auto& p) { p.rlimits = {{RLIMIT_CPU, 10, 10}}; }},
      {"rlimits", [](auto& p) { p.rlimits.assign(17, {RLIMIT_STACK, 1, 1}); }},
      {"cpus", [](auto& p) { p.cpus = {1024}; }},
      {"capabilities",
       [](auto& p) {
         p.GrantCapabilities(1ull << 21 /* SYS_ADMIN */, rights::ExtraCapabilities());
       }},
  };
  for (const auto& c : cases) {
    LaunchPlan plan = GoodLaunch();
    c.spoil(plan);
    auto result = plan.Validate();
    ASSERT_FALSE(result.ok()) << c.field;
    EXPECT_EQ(result.error().field(), c.field) << result.error().ToString();
  }
}

TEST(LaunchPlans, Encoded_CarriesEveryValue) {
  LaunchPlan plan = GoodLaunch();
  wire::Launch launch = plan.Encode();
  EXPECT_TRUE(wire::WellFormed(launch, sizeof(launch), 3));
  EXPECT_STREQ(launch.hostname, "sandbox-1.local");
  EXPECT_EQ(std::string(launch.hosts, launch.hosts_bytes), plan.hosts);
  EXPECT_EQ(std::string(launch.resolv_conf, launch.resolv_conf_bytes), plan.resolv_conf);
  EXPECT_STREQ(launch.views[1], "/proc/cpuinfo");
  EXPECT_EQ(launch.rlimits[0].hard, 4096u);
  EXPECT_EQ(launch.cpu_mask[0], 1ull | 1ull << 63);
  EXPECT_EQ(launch.cpu_mask[1], 1ull);
  EXPECT_EQ(launch.cpu_mask[15], 1ull << 63);
  EXPECT_EQ(launch.capabilities, kCodeCapabilities);
}

TEST(LaunchPlans, SpoiledPacket_NotWellFormed) {
  const wire::Launch good = GoodLaunch().Encode();
  auto bad = [&](const std::function<void(wire::Launch&)>& spoil) {
    wire::Launch launch = good;
    spoil(launch);
    return !wire::WellFormed(launch, sizeof(launch), 3);
  };
  EXPECT_TRUE(bad([](auto& l) { l.magic ^= 1; }));
  EXPECT_TRUE(bad([](auto& l) { l.version += 1; }));
  EXPECT_TRUE(bad([](auto& l) { l.view_count = 3; }));
  EXPECT_TRUE(bad([](auto& l) { l.view_count = 0xffffffff; }));
  EXPECT_TRUE(bad([](auto& l) { l.rlimit_count = 17; }));
  EXPECT_TRUE(bad([](auto& l) { l.hosts_bytes = wire::kMaxHosts + 1; }));
  EXPECT_TRUE(bad([](auto& l) { l.resolv_conf_bytes = 0xffffffff; }));
  EXPECT_TRUE(bad([](auto& l) { std::memset(l.hostname, 'a', sizeof(l.hostname)); }));
  EXPECT_TRUE(bad([](auto& l) { std::memset(l.views[0], '/', sizeof(l.views[0])); }));
  EXPECT_TRUE(bad([](auto& l) { l.views[0][0] = '\0'; }));
  // Random bytes never pass the magic, version and counts together.
  Rng rng(1);
  wire::Launch noise;
  auto* words = reinterpret_cast<uint64_t*>(&noise);
  for (int round = 0; round < 50; ++round) {
    for (size_t i = 0; i < sizeof(noise) / 8; ++i) words[i] = rng.Next();
    EXPECT_FALSE(wire::WellFormed(noise, sizeof(noise), round % 18));
  }
}

}  // namespace
}  // namespace dsec::spawn
