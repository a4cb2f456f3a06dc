// SPDX-License-Identifier: Apache-2.0
#include "watcher/mirror.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/id.h"

namespace dsec::watcher {
namespace {

std::string Id(const std::string& node) {
  return NewSandboxId(NodeId(node), Clock::System()).str();
}

v1::LostSandbox Sandbox(const std::string& id, uint64_t seq = 2) {
  v1::LostSandbox sandbox;
  sandbox.set_id(id);
  sandbox.set_last_event_seq(seq);
  sandbox.set_created_unix_ms(1);
  return sandbox;
}

TEST(Mirror, FollowsWhatTheNodeSays) {
  Mirror mirror("n1");
  Seen all;
  all.whole = true;
  all.next = 10;
  const std::string a = Id("n1");
  const std::string b = Id("n1");
  all.changed = {Sandbox(a), Sandbox(b)};
  EXPECT_TRUE(mirror.Apply(all, 0));
  EXPECT_EQ(mirror.size(), 2u);
  Seen later;
  later.next = 12;
  later.ended = {a};
  later.changed = {Sandbox(b, 7)};
  EXPECT_TRUE(mirror.Apply(later, 10));
  ASSERT_EQ(mirror.Parts().size(), 1u);
  ASSERT_EQ(mirror.Parts()[0].sandboxes_size(), 1);
  EXPECT_EQ(mirror.Parts()[0].sandboxes(0).id(), b);
  EXPECT_EQ(mirror.Parts()[0].sandboxes(0).last_event_seq(), 7u);
}

TEST(Mirror, Step_ChangesWhatIsKnownAndNothingElse) {
  Mirror mirror("n1");
  Seen all;
  all.whole = true;
  all.next = 1;
  v1::LostSandbox known = Sandbox(Id("n1"));
  known.set_project("root/a");
  all.changed = {known};
  v1::LostSandbox step;
  step.set_id(known.id());
  step.set_state(v1::STATE_STOPPING);
  step.set_last_event_seq(9);
  v1::LostSandbox unknown = step;
  unknown.set_id(Id("n1"));
  all.changed.push_back(step);
  all.changed.push_back(unknown);
  EXPECT_TRUE(mirror.Apply(all, 0));
  ASSERT_EQ(mirror.size(), 1u);
  const auto parts = mirror.Parts();
  const auto& left = parts[0].sandboxes(0);
  EXPECT_EQ(left.project(), "root/a");
  EXPECT_EQ(left.state(), v1::STATE_STOPPING);
  EXPECT_EQ(left.last_event_seq(), 9u);
}

TEST(Mirror, EventsThatBeginAnew_AskForAll) {
  Mirror mirror("n1");
  Seen all;
  all.whole = true;
  all.next = 10;
  EXPECT_TRUE(mirror.Apply(all, 0));
  Seen earlier;
  earlier.next = 3;
  EXPECT_FALSE(mirror.Apply(earlier, 10));
  EXPECT_EQ(mirror.place(), 0u);
  EXPECT_FALSE(mirror.known());
  // Another answer that was under way does not stand for all.
  Seen late;
  late.next = 4;
  late.changed = {Sandbox(Id("n1"))};
  EXPECT_FALSE(mirror.Apply(late, 3));
  EXPECT_EQ(mirror.place(), 0u);
  EXPECT_EQ(mirror.size(), 0u);
  all.next = 5;
  EXPECT_TRUE(mirror.Apply(all, 0));
  EXPECT_TRUE(mirror.known());
}

TEST(Mirror, HostileNode_FillsNothing) {
  Mirror mirror("n1");
  Seen seen;
  seen.whole = true;
  seen.next = 1;
  v1::LostSandbox many = Sandbox(Id("n1"));
  for (int i = 0; i < 65; ++i) (*many.mutable_labels())[std::to_string(i)] = "x";
  v1::LostSandbox wide = Sandbox(Id("n1"));
  wide.set_name(std::string(257, 'x'));
  v1::LostSandbox raw = Sandbox(Id("n1"));
  raw.set_project("\xff");
  seen.changed = {Sandbox(Id("n2")), Sandbox("sb"), many, wide, raw};
  EXPECT_FALSE(mirror.Apply(seen, 0));
  EXPECT_EQ(mirror.size(), 0u);
}

TEST(Mirror, Parts_AreBoundedAndComplete) {
  Mirror mirror("n1");
  Seen seen;
  seen.whole = true;
  seen.next = 1;
  for (int i = 0; i < 2'500; ++i) seen.changed.push_back(Sandbox(Id("n1")));
  EXPECT_TRUE(mirror.Apply(seen, 0));
  const auto parts = mirror.Parts();
  ASSERT_EQ(parts.size(), 3u);
  std::string last;
  int count = 0;
  for (const auto& part : parts) {
    EXPECT_LE(part.sandboxes_size(), 1'000);
    for (const auto& sandbox : part.sandboxes()) {
      EXPECT_LT(last, sandbox.id());
      last = sandbox.id();
      ++count;
    }
  }
  EXPECT_EQ(count, 2'500);

  Seen wide;
  wide.whole = true;
  wide.next = 1;
  for (int i = 0; i < 100; ++i) {
    v1::LostSandbox sandbox = Sandbox(Id("n1"));
    for (int j = 0; j < 64; ++j)
      (*sandbox.mutable_labels())[std::to_string(j)] = std::string(256, 'x');
    wide.changed.push_back(std::move(sandbox));
  }
  EXPECT_TRUE(mirror.Apply(wide, 0));
  for (const auto& part : mirror.Parts()) EXPECT_LE(part.ByteSizeLong(), 600u << 10);
}

}  // namespace
}  // namespace dsec::watcher
