// SPDX-License-Identifier: Apache-2.0
// Parts of the agent that need no sandbox.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string>

#include "aether/cgroup.h"
#include "aether/counters.h"
#include "aether/exec_request.h"
#include "aether/identity.h"
#include "aether/output_store.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

using ::testing::ElementsAre;

std::string Collect(const OutputStream& stream, uint64_t offset, uint64_t step) {
  std::string got;
  while (true) {
    OutputStream::View view = stream.Read(offset, step);
    for (const auto& piece : view.pieces) got += piece.data;
    if (view.next == offset) return got;
    offset = view.next;
  }
}

TEST(OutputStream, UpToTheCap_KeepsEverything) {
  for (size_t size : {0u, 1u, 9999u, 10000u}) {
    MemoryBudget budget(1 << 20);
    OutputStream stream(10000, budget);
    std::string data(size, 'x');
    stream.Append(data);
    EXPECT_EQ(stream.total(), size);
    EXPECT_EQ(stream.dropped(), 0u);
    EXPECT_EQ(Collect(stream, 0, 777), data);
  }
}

TEST(OutputStream, OverTheCap_KeepsHeadAndTailExactly) {
  MemoryBudget budget(1 << 20);
  OutputStream stream(10, budget);
  stream.Append("0123456789abcdef");
  EXPECT_EQ(stream.total(), 16u);
  EXPECT_EQ(stream.kept(), 10u);
  EXPECT_EQ(stream.dropped(), 6u);
  OutputStream::View view = stream.Read(0, 100);
  ASSERT_EQ(view.pieces.size(), 2u);
  EXPECT_EQ(view.pieces[0].data, "01234");
  EXPECT_EQ(view.pieces[1].data, "bcdef");
  EXPECT_EQ(view.pieces[1].offset, 11u);
  EXPECT_EQ(view.pieces[1].skipped, 6u);
  EXPECT_EQ(view.next, 16u);
}

TEST(OutputStream, ReadFromTheMiddle_StartsThere) {
  MemoryBudget budget(1 << 20);
  OutputStream stream(100, budget);
  stream.Append("hello world");
  OutputStream::View view = stream.Read(6, 3);
  ASSERT_EQ(view.pieces.size(), 1u);
  EXPECT_EQ(view.pieces[0].data, "wor");
  EXPECT_EQ(view.next, 9u);
  EXPECT_TRUE(stream.Read(11, 10).pieces.empty());
  EXPECT_TRUE(stream.Read(1000, 10).pieces.empty());
}

TEST(OutputStream, Freed_TellsThatAllIsDropped) {
  MemoryBudget budget(1 << 20);
  OutputStream stream(100, budget);
  stream.Append("hello");
  stream.Free();
  EXPECT_EQ(budget.used(), 0u);
  EXPECT_EQ(stream.dropped(), 5u);
  OutputStream::View view = stream.Read(0, 10);
  ASSERT_EQ(view.pieces.size(), 1u);
  EXPECT_EQ(view.pieces[0].skipped, 5u);
  EXPECT_EQ(view.next, 5u);
}

TEST(OutputStream, EmptyBudget_CountsWhatItCannotKeep) {
  MemoryBudget budget(4096);
  OutputStream stream(1 << 20, budget);
  std::string data(100000, 'x');
  for (char& byte : data) byte = static_cast<char>('a' + (&byte - data.data()) % 26);
  for (size_t i = 0; i < data.size(); i += 1000)
    stream.Append(std::string_view(data).substr(i, 1000));
  EXPECT_EQ(stream.total(), data.size());
  EXPECT_LE(stream.kept(), 4096u);
  EXPECT_GT(stream.kept(), 0u);
  EXPECT_LE(budget.used(), 4096u);
  OutputStream::View view = stream.Read(0, 1 << 20);
  for (const auto& piece : view.pieces)
    EXPECT_EQ(piece.data, data.substr(piece.offset, piece.data.size()));
}

TEST(OutputStream, BudgetFull_AsksForMemoryBack) {
  MemoryBudget budget(8192);
  OutputStream old(8000, budget);
  old.Append(std::string(4000, 'o'));
  budget.set_reclaim([&](size_t) {
    old.Free();
    return true;
  });
  OutputStream fresh(8000, budget);
  fresh.Append(std::string(8000, 'f'));
  EXPECT_EQ(fresh.dropped(), 0u);
  EXPECT_EQ(old.dropped(), 4000u);
}

// Whatever is written in whatever pieces: the first half of the cap and the last half come back, in
// any reading steps.
RC_GTEST_PROP(OutputStream, AnyWrites_SameAsTheModel, ()) {
  uint64_t cap = *rc::gen::inRange<uint64_t>(0, 5000);
  auto sizes = *rc::gen::container<std::vector<size_t>>(rc::gen::inRange<size_t>(0, 3000));
  uint64_t step = *rc::gen::inRange<uint64_t>(1, 4000);
  MemoryBudget budget(1 << 20);
  OutputStream stream(cap, budget);
  std::string all;
  uint64_t reader = 0;
  std::string followed;
  uint64_t skipped = 0;
  for (size_t size : sizes) {
    std::string piece;
    for (size_t i = 0; i < size; ++i) piece += static_cast<char>(all.size() + i);
    all += piece;
    stream.Append(piece);
    OutputStream::View view = stream.Read(reader, step);
    for (const auto& part : view.pieces) {
      RC_ASSERT(part.data == std::string_view(all).substr(part.offset, part.data.size()));
      skipped += part.skipped;
      followed += part.data;
    }
    reader = view.next;
  }
  RC_ASSERT(reader == followed.size() + skipped);
  std::string expected = all;
  if (all.size() > cap) expected = all.substr(0, cap - cap / 2) + all.substr(all.size() - cap / 2);
  RC_ASSERT(Collect(stream, 0, step) == expected);
  RC_ASSERT(stream.total() == all.size());
  RC_ASSERT(stream.dropped() == all.size() - expected.size());
}

constexpr char kPasswd[] =
    "root:x:0:0:root:/root:/bin/bash\n"
    "broken line\n"
    ":x:5:5::/:\n"
    "alice:x:1000:1001:Alice:/home/alice:/bin/sh\n"
    "far:x:70000:1:too far:/:/bin/sh\n"
    "bad:x:abc:1::/:\n"
    "rel:x:1002:1002::relative:/bin/sh\n"
    "42:x:1003:1003::/n:/bin/sh";
constexpr char kGroup[] =
    "root:x:0:\nwheel:x:10:bob,alice\nusers:x:100:alice\nhuge:x:99999:alice\nnobody";

TEST(Identity, KnownNames_ComeWithGroupAndHome) {
  auto alice = ResolveIdentity("alice", kPasswd, kGroup);
  ASSERT_TRUE(alice.ok());
  EXPECT_EQ(alice->uid, 1000u);
  EXPECT_EQ(alice->gid, 1001u);
  EXPECT_EQ(alice->home, "/home/alice");
  EXPECT_THAT(alice->groups, ElementsAre(10u, 100u));
  EXPECT_EQ(ResolveIdentity("rel", kPasswd, kGroup)->home, "/");
}

TEST(Identity, Numbers_NeedNoEntry) {
  EXPECT_EQ(ResolveIdentity("1000", kPasswd, kGroup)->name, "alice");
  auto unknown = ResolveIdentity("4321", kPasswd, kGroup);
  ASSERT_TRUE(unknown.ok());
  EXPECT_EQ(unknown->uid, 4321u);
  EXPECT_EQ(unknown->gid, 0u);
  auto both = ResolveIdentity("7:8", "", "");
  EXPECT_EQ(both->uid, 7u);
  EXPECT_EQ(both->gid, 8u);
  EXPECT_EQ(ResolveIdentity("alice:wheel", kPasswd, kGroup)->gid, 10u);
  // A name of digits only is a number.
  EXPECT_EQ(ResolveIdentity("42", kPasswd, kGroup)->uid, 42u);
}

TEST(Identity, Root_NeedsNoFiles) {
  for (const char* user : {"", "root", "0"}) {
    EXPECT_TRUE(IsPlainRoot(user));
    EXPECT_EQ(ResolveIdentity(user, "", "")->home, "/root");
  }
}

TEST(Identity, Unusable_IsRefusedByField) {
  for (const char* user : {"nobody-knows", "bad", "far", "70000", "1:70000", "alice:nogroup",
                           "99999999999", "-1", "x:"}) {
    auto identity = ResolveIdentity(user, kPasswd, kGroup);
    ASSERT_FALSE(identity.ok()) << user;
    EXPECT_EQ(identity.error().code(), Code::kInvalidArgument) << user;
    EXPECT_EQ(identity.error().field(), "user") << user;
  }
}

RC_GTEST_PROP(Identity, AnyFiles_NeverLeaveTheRange,
              (const std::string& passwd, const std::string& group, const std::string& user)) {
  auto identity = ResolveIdentity(user, passwd, group);
  if (identity.ok()) RC_ASSERT(identity->uid <= kMaxId && identity->gid <= kMaxId);
}

v1::ExecRequest Request() {
  v1::ExecRequest request;
  request.set_op_id("op");
  request.add_argv("true");
  return request;
}

void AddEnv(v1::ExecRequest& request, std::string key, std::string value) {
  v1::KeyValue& pair = *request.add_env();
  pair.set_key(std::move(key));
  pair.set_value(std::move(value));
}

TEST(ExecRequest, BadEnvironmentKeys_AreNamed) {
  for (std::string key :
       {std::string(), std::string("A=B"), std::string("A\nB"), std::string("A\0B", 3)}) {
    v1::ExecRequest request = Request();
    AddEnv(request, "FINE", "x");
    AddEnv(request, key, "x");
    auto checked = CheckExecRequest(request, {});
    ASSERT_FALSE(checked.ok());
    EXPECT_EQ(checked.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(checked.error().field(), "env[1]");
  }
  v1::ExecRequest odd = Request();
  AddEnv(odd, "A; touch /PWNED #", "a\nb=\xff");
  EXPECT_TRUE(CheckExecRequest(odd, {}).ok());
}

TEST(ExecRequest, Sizes_AreThoseOfTheKernel) {
  v1::ExecRequest request = Request();
  request.add_argv(std::string(131071, 'x'));
  EXPECT_TRUE(CheckExecRequest(request, {}).ok());
  *request.mutable_argv(1) += 'x';
  auto checked = CheckExecRequest(request, {});
  ASSERT_FALSE(checked.ok());
  EXPECT_EQ(checked.error().reason(), "exec.too_long");
  EXPECT_THAT(checked.error().message(), ::testing::HasSubstr("131071"));
  v1::ExecRequest many = Request();
  for (int i = 0; i < 31; ++i) many.add_argv(std::string(100000, 'x'));
  EXPECT_EQ(CheckExecRequest(many, {}).error().reason(), "exec.too_long");
  v1::ExecRequest value = Request();
  AddEnv(value, "A", std::string(1 << 20, 'x'));
  EXPECT_EQ(CheckExecRequest(value, {}).error().reason(), "exec.too_long");
}

TEST(ExecRequest, ArgvOrScript_ExactlyOne) {
  v1::ExecRequest both = Request();
  both.set_script("true");
  EXPECT_FALSE(CheckExecRequest(both, {}).ok());
  v1::ExecRequest none;
  none.set_op_id("op");
  EXPECT_FALSE(CheckExecRequest(none, {}).ok());
  none.set_script("");
  EXPECT_TRUE(CheckExecRequest(none, {}).ok());
}

TEST(ExecRequest, OddValues_AreRefusedByField) {
  auto field = [](auto change) {
    v1::ExecRequest request = Request();
    change(request);
    auto checked = CheckExecRequest(request, {});
    return checked.ok() ? std::string("ok") : checked.error().field();
  };
  EXPECT_EQ(field([](auto& r) { r.set_op_id("has space"); }), "op_id");
  EXPECT_EQ(field([](auto& r) { r.set_cwd("relative"); }), "cwd");
  EXPECT_EQ(field([](auto& r) { r.set_argv(0, std::string("a\0b", 3)); }), "argv[0]");
  EXPECT_EQ(field([](auto& r) { r.set_argv(0, ""); }), "argv[0]");
  EXPECT_EQ(field([](auto& r) { r.set_output_bytes(kMaxOutputBytes + 1); }), "output_bytes");
  EXPECT_EQ(field([](auto& r) { r.set_timeout_ms(~uint64_t{0}); }), "timeout_ms");
  EXPECT_EQ(field([](auto& r) { r.mutable_tty()->set_rows(70000); }), "tty");
  EXPECT_EQ(field([](auto& r) { r.set_session("a/b"); }), "session");
}

TEST(ExecRequest, Environment_LaterSourcesWin) {
  ExecDefaults defaults;
  defaults.env.emplace_back();
  defaults.env.back().set_key("A");
  defaults.env.back().set_value("sandbox");
  v1::ExecRequest request = Request();
  AddEnv(request, "A", "exec");
  AddEnv(request, "PATH", "/own");
  Identity identity;
  EXPECT_THAT(BuildEnvironment(request, defaults, identity),
              ElementsAre("A=exec", "HOME=/root", "PATH=/own", "USER=root"));
}

TEST(KernelValue, ReadsWholeKeysOnly) {
  constexpr char kText[] = "oom_kill_disable 0\nunder_oom 0\noom_kill 17\n";
  EXPECT_EQ(KernelValue(kText, "oom_kill"), 17u);
  EXPECT_EQ(KernelValue(kText, "oom"), 0u);
  EXPECT_EQ(KernelValue("max 3", "max"), 3u);
  EXPECT_EQ(KernelValue("", "max"), 0u);
}

TEST(Counters, V2Files_AreReadWhereV1IsAbsent) {
  auto dir = os::TempDir::Create("dsec-aether-");
  ASSERT_TRUE(dir.ok());
  ASSERT_TRUE(os::CreateFile(dir->fd(), "memory.events", "low 0\noom 1\noom_kill 2\n", 0644).ok());
  ASSERT_TRUE(os::CreateFile(dir->fd(), "pids.events", "max 5\n", 0644).ok());
  ASSERT_TRUE(os::CreateFile(dir->fd(), "cpu.stat", "usage_usec 9\nthrottled_usec 7\n", 0644).ok());
  Counters counters(dir->fd(), -1, -1, -1);
  Counts counts = counters.Read();
  EXPECT_EQ(counts.oom_kills, 2u);
  EXPECT_EQ(counts.forks_denied, 5u);
  EXPECT_EQ(counts.throttled_usec, 7u);
}

}  // namespace
}  // namespace dsec::aether
