// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "vmm/boot_config.h"
#include "vmm/keeper.h"
#include "vmm/machine.h"
#include "vmm/port_sync.h"
#include "vmm/qmp.h"

namespace dsec::vmm {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

BootConfig Config() {
  BootConfig config;
  config.port_secret = std::string(kPortSecretBytes, 's');
  config.token = std::string(kTokenBytes, '\xff');
  config.layers = 3;
  config.hostname = "sb-local-01";
  config.memory_bytes = 1 << 28;
  config.cpu_millis = 1500;
  config.pids = 128;
  config.shm_bytes = 1 << 26;
  config.open_files = 1024;
  return config;
}

TEST(BootConfig, ComesBackAsItWas) {
  const auto parsed = BootConfig::Parse(Config().Encode());
  ASSERT_TRUE(parsed.ok()) << parsed.error().ToString();
  EXPECT_EQ(*parsed, Config());
}

TEST(BootConfig, TakesNothingElse) {
  const std::string good = Config().Encode();
  auto refused = [](std::string text) {
    text.resize(kBootConfigBytes, '\0');
    const auto parsed = BootConfig::Parse(text);
    return !parsed.ok() && parsed.error().reason() == "vm.boot_config";
  };
  EXPECT_TRUE(refused(""));
  EXPECT_TRUE(refused("dsec-boot 2" + good.substr(11)));
  EXPECT_FALSE(BootConfig::Parse(good + "x").ok());
  for (const auto& [from, to] :
       {std::pair("layers=3", "layers=11"), std::pair("layers=3", "layers=03"),
        std::pair("layers=3", "layers=-1"), std::pair("layers=3\n", ""),
        std::pair("layers=3", "layers=3\nlayers=3"), std::pair("hostname=sb", "hostname=/b"),
        std::pair("pids=128", "pids=0"), std::pair("ff", "fg"), std::pair("end\n", ""),
        std::pair("user_namespace=1", "user_namespace=0"),
        std::pair("pids=128", "pids=99999999999999999999999")}) {
    std::string text = good;
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, std::string_view(from).size(), to);
    EXPECT_TRUE(refused(text)) << from << " -> " << to;
  }
  std::string more = good;
  more[good.size() - 1] = 'x';
  EXPECT_TRUE(refused(more));
}

Machine SmallMachine() {
  Machine machine;
  machine.memory_mib = 224;
  machine.kernel_fd = 10;
  machine.initrd_fd = 11;
  machine.port_fd = 12;
  machine.qmp_fd = 13;
  machine.disks = {{"config", 14, true}, {"disk", 15, false}};
  return machine;
}

TEST(Machine, BecomesACommandLine) {
  const Machine machine = SmallMachine();
  ASSERT_TRUE(machine.Validate().ok());
  const QemuCommand command = MakeQemuCommand(machine);
  EXPECT_EQ(command.fds, (std::vector<int>{10, 11, 12, 13, 14, 15}));
  const auto& arguments = command.arguments;
  EXPECT_EQ(arguments.front(), kQemuProgram);
  for (const char* wanted :
       {"tcg,tb-size=64", "-nodefaults", "-no-reboot", "/proc/self/fd/32", "/proc/self/fd/33",
        "socket,id=port,fd=34,server=on,wait=off", "socket,id=qmp,fd=35,server=on,wait=off",
        "fd=36,set=1", "fd=37,set=2", "virtio-blk-device,drive=disk,serial=disk",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"}) {
    EXPECT_THAT(arguments, Contains(wanted));
  }
  EXPECT_THAT(arguments, Contains(HasSubstr("node-name=config,read-only=on")));
  EXPECT_THAT(arguments, Contains(HasSubstr("node-name=disk,read-only=off")));
  EXPECT_THAT(arguments, Contains(HasSubstr("tsc_early_khz")));
  EXPECT_THAT(arguments, Not(Contains(HasSubstr("net"))));

  Machine fast = machine;
  fast.acceleration = Acceleration::kKvm;
  const auto with_kvm = MakeQemuCommand(fast).arguments;
  EXPECT_THAT(with_kvm, Contains("kvm"));
  EXPECT_THAT(with_kvm, Not(Contains(HasSubstr("tsc_early_khz"))));
}

TEST(Machine, RefusesWhatQemuWouldTakeForSomethingElse) {
  auto refused = [](void (*change)(Machine&)) {
    Machine machine = SmallMachine();
    change(machine);
    const auto checked = machine.Validate();
    return !checked.ok() && checked.error().reason() == "vm.machine";
  };
  EXPECT_TRUE(refused([](Machine& m) { m.vcpus = 0; }));
  EXPECT_TRUE(refused([](Machine& m) { m.memory_mib = 16; }));
  EXPECT_TRUE(refused([](Machine& m) { m.port_fd = -1; }));
  EXPECT_TRUE(refused([](Machine& m) { m.disks[0].serial = "a,readonly"; }));
  EXPECT_TRUE(refused([](Machine& m) { m.disks[0].serial = "disk"; }));
  EXPECT_TRUE(refused([](Machine& m) { m.disks[1].fd = -1; }));
  EXPECT_TRUE(refused([](Machine& m) { m.disks.resize(kMaxDisks + 1, m.disks[0]); }));
}

TEST(PortSync, SkipsWhatAnEarlierConnectionLeft) {
  PortSync sync("0123456789abcdef");
  const std::string nonce = sync.sync().substr(kPortSecretBytes);
  const std::string answer = SyncAnswer("0123456789abcdef", nonce);
  const std::string stale = SyncAnswer("0123456789abcdef", std::string(kNonceBytes, 'x'));
  const std::string all = "old bytes" + stale + stale.substr(0, 20) + answer + "ttrpc";
  // In pieces of every size.
  for (size_t piece = 1; piece <= all.size(); ++piece) {
    PortSync each = sync;
    size_t taken = 0;
    bool done = false;
    for (size_t at = 0; at < all.size() && !done; at = taken) {
      const auto step = each.Look(std::string_view(all).substr(at, piece));
      ASSERT_TRUE(step.ok());
      taken += step->take;
      done = step->done;
    }
    EXPECT_TRUE(done) << piece;
    EXPECT_EQ(all.substr(taken), "ttrpc") << piece;
  }
}

TEST(PortSync, GivesUpOnAGuestThatFloods) {
  PortSync sync("0123456789abcdef");
  const std::string noise(1 << 20, 'x');
  size_t given = 0;
  while (true) {
    const auto step = sync.Look(noise);
    if (!step.ok()) {
      EXPECT_EQ(step.error().reason(), "vm.port");
      break;
    }
    given += noise.size();
    ASSERT_LE(given, kMaxStaleBytes);
  }
}

TEST(Console, TellsHowTheGuestEnded) {
  EXPECT_FALSE(ParseConsole("").said);
  EXPECT_TRUE(ParseConsole("x\n[ 1.0] Kernel panic - not syncing: attempt").panicked);
  const auto end =
      ParseConsole("dsec-guest: [1.0] ready\r\ndsec-guest: [2.000] end: oom\r\n[ 3] Power down");
  EXPECT_TRUE(end.said);
  EXPECT_EQ(end.why, "oom");
  EXPECT_FALSE(ParseConsole("somebody: [2.000] end: oom").said);
  EXPECT_EQ(ParseConsole("dsec-guest: [2.0] end: a\x1b[2J\xff").why, "a?[2J?");
  EXPECT_TRUE(ParseExit("signal 9\n").signaled);
  EXPECT_EQ(ParseExit("exited 1\n").status, 1);
  EXPECT_FALSE(ParseExit("exited 1").known);
  EXPECT_FALSE(ParseExit("exited x\n").known);
}

Result<std::optional<QmpMessage>> Parse(const std::string& bytes) {
  QmpParser parser;
  parser.Feed(bytes);
  return parser.Next();
}

TEST(Qmp, TellsMessagesApart) {
  EXPECT_EQ((*Parse("{\"QMP\": {}}\r\n"))->kind, QmpMessage::Kind::kGreeting);
  const auto answer = Parse("{\"return\": {\"status\": \"running\"}, \"id\": \"7\"}\r\n");
  EXPECT_EQ((*answer)->id, "7");
  EXPECT_EQ((*answer)->data["status"], "running");
  const auto refusal = Parse("{\"error\": {\"class\": \"GenericError\", \"desc\": \"no\"}}\n");
  EXPECT_EQ((*refusal)->kind, QmpMessage::Kind::kError);
  EXPECT_EQ((*refusal)->name, "GenericError");
  EXPECT_EQ((*Parse("{\"event\": \"STOP\"}\n"))->name, "STOP");
  EXPECT_FALSE(Parse("{\"event\"")->has_value());
}

TEST(Qmp, RefusesWhatIsNoMessage) {
  for (const std::string& line :
       {std::string("x\n"), std::string("[]\n"), std::string("{}\n"),
        std::string(QmpParser::kMaxLine + 2, 'x'),
        "{\"return\": " + std::string(100, '[') + std::string(100, ']') + "}\n"}) {
    const auto parsed = Parse(line);
    ASSERT_FALSE(parsed.ok()) << line.substr(0, 40);
    EXPECT_EQ(parsed.error().reason(), "vm.qmp");
  }
}

}  // namespace
}  // namespace dsec::vmm
