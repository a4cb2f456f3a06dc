// SPDX-License-Identifier: Apache-2.0
#include "model/spec.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <limits>

namespace dsec::model {
namespace {

v1::SandboxSpec Minimal() {
  v1::SandboxSpec spec;
  spec.set_base("python:3.11");
  return spec;
}

// The spec is refused; returns "<reason> <field>".
std::string Refusal(v1::SandboxSpec spec, const LimitsPolicy& policy = {}) {
  auto result = NormalizeSpec(spec, policy);
  if (result.ok()) return "accepted";
  EXPECT_NE(result.error().message().find(result.error().field()), std::string::npos)
      << result.error().ToString();
  return fmt::format("{} {}", result.error().reason(), result.error().field());
}

TEST(NormalizeSpec, Minimal_TakesDefaultsAndStaysSo) {
  v1::SandboxSpec spec = Minimal();
  ASSERT_TRUE(NormalizeSpec(spec, {}).ok());
  EXPECT_EQ(spec.backend(), v1::BACKEND_CONTAINER);
  EXPECT_EQ(spec.limits().memory_bytes(), 1ull << 30);
  EXPECT_EQ(spec.limits().cpu_millis(), 1000u);
  EXPECT_EQ(spec.limits().shm_bytes(), 64ull << 20);
  EXPECT_EQ(spec.limits().disk_inodes(), (2ull << 30) / 4096);
  EXPECT_EQ(spec.network().mode(), "none");
  EXPECT_EQ(spec.workdir(), "/");
  EXPECT_EQ(spec.user(), "0");
  EXPECT_EQ(spec.ttl_ms(), 0u);
  const std::string first = spec.SerializeAsString();
  ASSERT_TRUE(NormalizeSpec(spec, {}).ok());
  EXPECT_EQ(spec.SerializeAsString(), first);
}

TEST(NormalizeSpec, SmallMemory_LowersDefaultShm) {
  v1::SandboxSpec spec = Minimal();
  spec.mutable_limits()->set_memory_bytes(32 << 20);
  ASSERT_TRUE(NormalizeSpec(spec, {}).ok());
  EXPECT_EQ(spec.limits().shm_bytes(), 16u << 20);
}

TEST(NormalizeSpec, OutOfRange_NamesTheField) {
  struct Case {
    const char* field;
    void (v1::Limits::*set)(uint64_t);
    uint64_t value;
  };
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  for (const Case& item : {
           Case{"limits.memory_bytes", &v1::Limits::set_memory_bytes, 1},
           Case{"limits.memory_bytes", &v1::Limits::set_memory_bytes, kHuge},
           Case{"limits.cpu_millis", &v1::Limits::set_cpu_millis, 1},
           Case{"limits.cpu_millis", &v1::Limits::set_cpu_millis, 1'000'000'000},
           Case{"limits.pids", &v1::Limits::set_pids, 1},
           Case{"limits.pids", &v1::Limits::set_pids, kHuge},
           Case{"limits.disk_bytes", &v1::Limits::set_disk_bytes, 1},
           Case{"limits.disk_bytes", &v1::Limits::set_disk_bytes, kHuge},
           Case{"limits.disk_inodes", &v1::Limits::set_disk_inodes, 1},
           Case{"limits.disk_inodes", &v1::Limits::set_disk_inodes, kHuge},
           Case{"limits.shm_bytes", &v1::Limits::set_shm_bytes, 1},
           Case{"limits.shm_bytes", &v1::Limits::set_shm_bytes, 2ull << 30},
           Case{"limits.open_files", &v1::Limits::set_open_files, 1},
           Case{"limits.open_files", &v1::Limits::set_open_files, kHuge},
           Case{"limits.output_bytes", &v1::Limits::set_output_bytes, 1},
           Case{"limits.output_bytes", &v1::Limits::set_output_bytes, kHuge},
       }) {
    v1::SandboxSpec spec = Minimal();
    (spec.mutable_limits()->*item.set)(item.value);
    EXPECT_EQ(Refusal(spec), std::string("spec.out_of_range ") + item.field) << item.value;
  }
}

TEST(NormalizeSpec, Times_AreCheckedAgainstEachOther) {
  v1::SandboxSpec spec = Minimal();
  spec.set_ttl_ms(999);
  EXPECT_EQ(Refusal(spec), "spec.out_of_range ttl_ms");
  spec.set_ttl_ms(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(Refusal(spec), "spec.out_of_range ttl_ms");
  spec.set_ttl_ms(5000);
  spec.set_idle_ms(6000);
  EXPECT_EQ(Refusal(spec), "spec.out_of_range idle_ms");
  spec.set_idle_ms(0);
  spec.set_ttl_extension_ms(5000);
  EXPECT_EQ(Refusal(spec), "spec.contradiction ttl_policy.max_extension_ms");
  spec.set_ttl_waits_for_exec(true);
  EXPECT_EQ(Refusal(spec), "accepted");
}

TEST(NormalizeSpec, Unenforceable_IsRefusedWithTheReason) {
  LimitsPolicy policy;
  policy.disk_bytes.unenforceable = "no quota here";
  v1::SandboxSpec spec = Minimal();
  EXPECT_EQ(Refusal(spec, policy), "limit.unenforceable limits.disk_bytes");
}

TEST(NormalizeSpec, InodesBoundedByBytes_RefusesFewerThanFollow) {
  LimitsPolicy policy;
  policy.inode_cost_bytes = 256;
  v1::SandboxSpec spec = Minimal();
  spec.mutable_limits()->set_disk_bytes(64 << 20);
  ASSERT_TRUE(NormalizeSpec(spec, policy).ok());
  EXPECT_EQ(spec.limits().disk_inodes(), (64u << 20) / 256);
  spec.mutable_limits()->set_disk_inodes((64 << 20) / 256 - 1);
  EXPECT_EQ(Refusal(spec, policy), "limit.unenforceable limits.disk_inodes");
}

TEST(NormalizeSpec, References_AreCheckedForForm) {
  v1::SandboxSpec spec;
  EXPECT_EQ(Refusal(spec), "spec.empty base");
  spec.set_base("../../etc");
  EXPECT_EQ(Refusal(spec), "spec.layer_ref base");
  spec = Minimal();
  spec.add_toolkits("ok:1");
  spec.add_toolkits("bad\nname");
  EXPECT_EQ(Refusal(spec), "spec.layer_ref toolkits[1]");
  spec = Minimal();
  for (int i = 0; i < 65; ++i) spec.add_toolkits("t:1");
  EXPECT_EQ(Refusal(spec), "spec.too_long toolkits");
}

TEST(NormalizeSpec, OtherFields_AreChecked) {
  auto with = [](auto change) {
    v1::SandboxSpec spec = Minimal();
    change(spec);
    return Refusal(spec);
  };
  EXPECT_EQ(with([](auto& s) { s.mutable_network()->set_mode("host"); }),
            "spec.network network.mode");
  EXPECT_EQ(with([](auto& s) { s.set_backend(static_cast<v1::Backend>(99)); }),
            "spec.backend backend");
  EXPECT_EQ(with([](auto& s) { s.set_workdir("relative"); }), "spec.path workdir");
  EXPECT_EQ(with([](auto& s) { s.set_workdir(std::string("/a\0b", 4)); }), "spec.nul_byte workdir");
  EXPECT_EQ(with([](auto& s) { s.set_workdir("/\xff"); }), "spec.path workdir");
  EXPECT_EQ(with([](auto& s) { s.set_workdir("/" + std::string(4095, 'a')); }),
            "spec.too_long workdir");
  EXPECT_EQ(with([](auto& s) { s.set_user("65536"); }), "spec.user user");
  EXPECT_EQ(with([](auto& s) { s.set_user("1:"); }), "spec.user user");
  EXPECT_EQ(with([](auto& s) { s.set_user("1:2:3"); }), "spec.user user");
  EXPECT_EQ(with([](auto& s) { s.set_user("a b"); }), "spec.user user");
  EXPECT_EQ(with([](auto& s) { s.set_user("www-data"); }), "accepted");
  EXPECT_EQ(with([](auto& s) { s.set_user("1000:65535"); }), "accepted");
  EXPECT_EQ(with([](auto& s) { s.set_hostname("-a"); }), "spec.hostname hostname");
  EXPECT_EQ(with([](auto& s) { s.set_hostname("a..b"); }), "spec.hostname hostname");
  EXPECT_EQ(with([](auto& s) { s.set_hostname("a-.b"); }), "spec.hostname hostname");
  EXPECT_EQ(with([](auto& s) { s.set_hostname(std::string(64, 'a')); }), "spec.hostname hostname");
  EXPECT_EQ(with([](auto& s) { s.set_hostname("a-1.example"); }), "accepted");
  EXPECT_EQ(with([](auto& s) { s.set_name("a/b"); }), "spec.name name");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["a=b"] = ""; }), "spec.label labels");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["k"] = "a\nb"; }), "spec.label labels.k");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["k"] = "\xc3\xa9 \xe2\x82\xac"; }),
            "accepted");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["k"] = "\xc0\x80"; }), "spec.label labels.k");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["k"] = "\xed\xa0\x80"; }),
            "spec.label labels.k");
  EXPECT_EQ(with([](auto& s) { (*s.mutable_labels())["k"] = std::string(1 << 20, 'x'); }),
            "spec.label labels.k");
  EXPECT_EQ(with([](auto& s) { s.add_entrypoint(""); }), "spec.empty entrypoint[0]");
  EXPECT_EQ(with([](auto& s) { s.add_entrypoint(std::string(kMaxArgString, 'x')); }),
            "spec.too_long entrypoint[0]");
  EXPECT_EQ(with([](auto& s) { s.add_entrypoint(std::string(kMaxArgString - 1, 'x')); }),
            "accepted");
}

std::string EnvRefusal(std::string key, std::string value = "") {
  google::protobuf::RepeatedPtrField<v1::KeyValue> env;
  env.Add()->set_key(std::move(key));
  env[0].set_value(std::move(value));
  auto result = CheckEnv(env, "env");
  return result.ok() ? "accepted" : std::string(result.error().reason());
}

// Acceptance case 17.
TEST(CheckEnv, HostileKeys_AreRefusedAndValuesAreNot) {
  for (const char* key :
       {"A; touch /PWNED #", "", "A=B", "A\nB", "1A", "-A", "A B", "A$(id)", "\xc3\xa9"}) {
    EXPECT_EQ(EnvRefusal(key), "spec.env_key") << key;
  }
  EXPECT_EQ(EnvRefusal(std::string("A\0B", 3)), "spec.env_key");
  EXPECT_EQ(EnvRefusal("A", "line\nline"), "accepted");
  EXPECT_EQ(EnvRefusal("A", "a=b"), "accepted");
  EXPECT_EQ(EnvRefusal("A", "\xff\xfe"), "accepted");
  EXPECT_EQ(EnvRefusal("java.home-x_", ""), "accepted");
  EXPECT_EQ(EnvRefusal("A", std::string("\0", 1)), "spec.nul_byte");
  EXPECT_EQ(EnvRefusal("A", std::string(kMaxArgString - 3, 'x')), "accepted");
  EXPECT_EQ(EnvRefusal("A", std::string(kMaxArgString - 2, 'x')), "spec.too_long");
}

TEST(CheckEnv, TenThousandVariables_AreAccepted) {
  google::protobuf::RepeatedPtrField<v1::KeyValue> env;
  for (int i = 0; i < 10'000; ++i) env.Add()->set_key(fmt::format("KEY_{}", i));
  EXPECT_TRUE(CheckEnv(env, "env").ok());
  env.Add()->set_key("KEY_7");
  EXPECT_FALSE(CheckEnv(env, "env").ok());
}

TEST(Quoted, HostileBytes_AreEscapedAndCut) {
  EXPECT_EQ(Quoted("a\"b\n\x1b"), "\"a\\\"b\\x0a\\x1b\"");
  EXPECT_EQ(Quoted(std::string(100, 'x'), 3), "\"xxx...\"");
}

TEST(NormalizeSpec, AnyLimits_AreAcceptedInRangeOrRefusedByField) {
  rc::check([] {
    v1::SandboxSpec spec = Minimal();
    v1::Limits& limits = *spec.mutable_limits();
    auto any = [] {
      return *rc::gen::oneOf(rc::gen::arbitrary<uint64_t>(),
                             rc::gen::inRange<uint64_t>(0, 1ull << 33));
    };
    limits.set_memory_bytes(any());
    limits.set_cpu_millis(any());
    limits.set_pids(any());
    limits.set_disk_bytes(any());
    limits.set_disk_inodes(any());
    limits.set_shm_bytes(any());
    limits.set_open_files(any());
    limits.set_output_bytes(any());
    const LimitsPolicy policy;
    auto result = NormalizeSpec(spec, policy);
    if (!result.ok()) {
      RC_ASSERT(result.error().code() == Code::kInvalidArgument);
      RC_ASSERT(result.error().field().starts_with("limits."));
      return;
    }
    RC_ASSERT(limits.memory_bytes() >= policy.memory_bytes.min &&
              limits.memory_bytes() <= policy.memory_bytes.max);
    RC_ASSERT(limits.disk_inodes() >= policy.disk_inodes.min &&
              limits.disk_inodes() <= policy.disk_inodes.max);
    RC_ASSERT(limits.shm_bytes() <= limits.memory_bytes());
  });
}

// Whatever text gets in, what is accepted can be serialised and read back.
TEST(NormalizeSpec, AnyText_RoundTripsWhenAccepted) {
  rc::check([] {
    v1::SandboxSpec spec = Minimal();
    const std::string text = *rc::gen::arbitrary<std::string>();
    spec.set_name(text);
    spec.set_hostname(*rc::gen::arbitrary<std::string>());
    spec.set_workdir("/" + *rc::gen::arbitrary<std::string>());
    (*spec.mutable_labels())["k"] = *rc::gen::arbitrary<std::string>();
    if (!NormalizeSpec(spec, {}).ok()) return;
    v1::SandboxSpec parsed;
    RC_ASSERT(parsed.ParseFromString(spec.SerializeAsString()));
  });
}

}  // namespace
}  // namespace dsec::model
