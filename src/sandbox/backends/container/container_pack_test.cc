// SPDX-License-Identifier: Apache-2.0
// Packs of running sandboxes on the real kernel.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>

#include "base/fault.h"
#include "sandbox/testing/container_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::IsEmpty;

// All that tells two trees apart.
constexpr char kList[] =
    "cd /; ls -AR work usr/bin bin root; cat work/a work/d/c; stat -c '%n %a %u %g %y %F' work "
    "work/d bin usr/bin; stat -c '%n %a %u %g %h %s %y %F' work/a work/d/c work/sparse usr/bin/new";

class ContainerPack : public testing::ContainerTest {
 protected:
  void TearDown() override {
    fault::DisarmAll();
    ContainerTest::TearDown();
  }
  Result<v1::PackReply> Pack(Instance& instance, v1::PackRequest request = {},
                             PackProgressFn progress = nullptr, int seconds = 60) {
    return On(instance.Pack(std::move(request), std::move(progress),
                            runtime::Deadline::After(std::chrono::seconds(seconds))));
  }
  std::string Out(Instance& instance, const std::string& script) {
    auto ran = Run(instance, script);
    EXPECT_TRUE(ran.ok()) << ran.error().ToString();
    return ran.ok() ? ran->out : "";
  }
  // What there is in the folder of writable layers.
  std::vector<std::string> Layers() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(backend_->ScratchPath() + "/")) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path);
    std::string text;
    std::getline(file, text);
    return text;
  }
  std::string Freezer(const v1::SandboxRecord& record) const {
    for (const char* hierarchy : {"unified", "."}) {
      const std::string path = CgroupPath(hierarchy, record) + "/code/cgroup.freeze";
      if (::access(path.c_str(), F_OK) == 0) return Read(path);
    }
    return "missing";
  }
};

TEST_F(ContainerPack, Layer_ShowsTheSameInAnotherSandbox) {
  v1::SandboxRecord record = NewRecord();
  const auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  Out(*instance,
      "cd /; mkdir work work/d; echo a > work/a; chmod 4711 work/a; echo b > work/d/b; "
      "chown 1000:1000 work/d/b; mv work/d/b work/d/c; rm bin/nproc; rm -r usr/bin; mkdir usr/bin; "
      "echo n > usr/bin/new; truncate -s 1M work/sparse; touch -d @1.5 work/a; echo h > "
      "/root/.bash_history; echo t > /tmp/t");
  v1::PackRequest request;
  request.set_name("packed:1");
  (*request.mutable_labels())["task"] = "7";
  request.set_principal("trainer");
  std::vector<v1::PackProgress::Phase> phases;
  auto packed = Pack(*instance, request, [&](const v1::PackProgress& progress) {
    if (phases.empty() || phases.back() != progress.phase()) phases.push_back(progress.phase());
    return true;
  });
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  EXPECT_THAT(phases, ::testing::ElementsAre(
                          v1::PackProgress::PHASE_FREEZE, v1::PackProgress::PHASE_READ,
                          v1::PackProgress::PHASE_WRITE, v1::PackProgress::PHASE_PUBLISH));
  EXPECT_GT(packed->frozen_us(), 0U);
  EXPECT_GE(packed->scrubbed(), 5U) << "three files of etc, a history, a temporary file";
  const auto& labels = packed->layer().labels();
  EXPECT_EQ(labels.at("task"), "7");
  EXPECT_EQ(labels.at("dsec.pack.sandbox"), record.id());
  EXPECT_EQ(labels.at("dsec.pack.principal"), "trainer");
  EXPECT_EQ(labels.at("dsec.pack.parents"), record.layer_ids(0));
  EXPECT_EQ(Freezer(record), "0");
  EXPECT_THAT(Layers(), ::testing::ElementsAre(record.scratch()));

  // As it was, and again: the same layer.
  auto again = Pack(*instance);
  ASSERT_TRUE(again.ok()) << again.error().ToString();
  EXPECT_TRUE(again->existed());
  EXPECT_EQ(again->layer().id(), packed->layer().id());

  v1::SandboxRecord other = NewRecord();
  other.mutable_spec()->set_workspace("packed:1");
  auto copy = MustCreate(other);
  ASSERT_NE(copy, nullptr);
  std::string wanted = Out(*instance, std::string("rm /root/.bash_history; ") + kList);
  std::string shown = Out(*copy, kList);
  EXPECT_EQ(shown, wanted);
  EXPECT_EQ(Out(*copy, "cat /root/.bash_history /tmp/t 2>/dev/null; ls /tmp"), "");
  copy.reset();  // a sandbox holds its layers
  EXPECT_TRUE(Destroy(other).ok());
  EXPECT_TRUE(Destroy(record).ok());
  EXPECT_TRUE(layers_->Remove(packed->layer().id()).ok());
}

// A redirect would make the layer depend on the layers of its sandbox.
TEST_F(ContainerPack, RenamedFolderOfALowerLayer_IsWholeInTheLayer) {
  ASSERT_TRUE(
      layers_->AddLayer(image::LayerKind::kWorkspace, "lower:1", "/work/deep/er/f", "42").ok());
  v1::SandboxRecord record = NewRecord();
  record.mutable_spec()->set_workspace("lower:1");
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_EQ(Out(*instance, "mv /work/deep /moved && cat /moved/er/f && ls -A /work"), "42");
  const auto packed = Pack(*instance);
  ASSERT_TRUE(packed.ok()) << packed.error().ToString();
  instance.reset();
  EXPECT_TRUE(Destroy(record).ok());

  v1::SandboxRecord other = NewRecord();  // without lower:1
  other.mutable_spec()->set_workspace(packed->layer().id());
  auto copy = MustCreate(other);
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(Out(*copy, "cat /moved/er/f; ls -A /work"), "42");
  copy.reset();
  EXPECT_TRUE(Destroy(other).ok());
  EXPECT_TRUE(layers_->Remove(packed->layer().id()).ok());
  EXPECT_TRUE(layers_->Remove("lower:1").ok());
}

TEST_F(ContainerPack, Refusals_AreTypedAndLeaveTheSandboxAlone) {
  v1::SandboxRecord record = NewRecord();
  const auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  Out(*instance, "mkdir /work; echo 'token sk-live-42' > /work/config");
  const auto reason = [&](const std::function<void(v1::PackRequest&)>& change) {
    v1::PackRequest request;
    change(request);
    const auto packed = Pack(*instance, request);
    return packed.ok() ? "packed"
                       : std::string(packed.error().reason()) + " " + packed.error().field();
  };
  EXPECT_EQ(reason([](auto& r) { r.set_kind("base"); }), "pack.bad_kind kind");
  EXPECT_EQ(reason([](auto& r) { r.set_kind("thing"); }), "layer.bad_kind kind");
  EXPECT_EQ(reason([](auto& r) { r.set_name("NO NAME"); }), "layer.bad_name name");
  EXPECT_EQ(reason([](auto& r) { (*r.mutable_labels())["dsec.x"] = ""; }),
            "pack.bad_label labels.dsec.x");
  EXPECT_EQ(reason([](auto& r) { r.add_scrub("a/b"); }), "pack.bad_rule scrub[0]");
  EXPECT_EQ(reason([](auto& r) { r.add_canary_paths("/work/*"); }), "pack.canary canary_paths[0]");
  EXPECT_EQ(reason([](auto& r) { r.add_canary_contents("sk-live"); }),
            "pack.canary canary_contents[0]");
  for (const char* point : {"sandbox.pack.frozen", "sandbox.pack.copied"}) {
    ASSERT_TRUE(fault::Arm(fmt::format("{}=error:EIO*1", point)).ok());
    EXPECT_EQ(reason([](auto&) {}), "fault.injected ") << point;
    EXPECT_EQ(Freezer(record), "0");
    EXPECT_THAT(Layers(), ::testing::ElementsAre(record.scratch()));
    EXPECT_EQ(Out(*instance, "echo alive"), "alive\n");
  }
  EXPECT_TRUE(Destroy(record).ok());
}

TEST_F(ContainerPack, OneAtATime_AndCancelledByCallerDeadlineAndRemoval) {
  v1::SandboxRecord record = NewRecord();
  const auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  const uint64_t fired = fault::Fired("sandbox.pack.copied");
  ASSERT_TRUE(fault::Arm("sandbox.pack.copied=block").ok());
  auto first = std::async(std::launch::async, [&] { return Pack(*instance); });
  ASSERT_TRUE(fault::WaitFired("sandbox.pack.copied", fired + 1, std::chrono::seconds(20)));
  EXPECT_EQ(Freezer(record), "0");
  const auto other_pack = Pack(*instance);
  ASSERT_FALSE(other_pack.ok());
  EXPECT_EQ(other_pack.error().reason(), "pack.under_way");
  EXPECT_THAT(*Sweep({record}), IsEmpty()) << "the copy of a pack under way is no orphan";
  EXPECT_THAT(Layers(), ::testing::SizeIs(2));
  // The removal of the sandbox waits for the pack and ends it.
  auto destroyed = std::async(std::launch::async, [&] { return Destroy(record); });
  EXPECT_EQ(destroyed.wait_for(std::chrono::milliseconds(300)), std::future_status::timeout);
  fault::DisarmAll();
  EXPECT_TRUE(destroyed.get().ok());
  const auto ended = first.get();
  ASSERT_FALSE(ended.ok());
  EXPECT_EQ(ended.error().reason(), kRemovedReason);
  EXPECT_THAT(Layers(), IsEmpty());

  v1::SandboxRecord other = NewRecord();
  const auto second = MustCreate(other);
  ASSERT_NE(second, nullptr);
  Out(*second, "echo x > /x");
  const auto refused = Pack(*second, {}, [](const v1::PackProgress& progress) {
    return progress.phase() != v1::PackProgress::PHASE_WRITE;
  });
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().reason(), "layer.cancelled");
  ASSERT_TRUE(fault::Arm("sandbox.pack.copied=block").ok());
  const auto late = Pack(*second, {}, nullptr, 1);
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code(), Code::kDeadlineExceeded);
  fault::DisarmAll();
  EXPECT_TRUE(Destroy(other).ok());
  EXPECT_THAT(Layers(), IsEmpty());
}

// A state that no write tears: numbered pairs are written one after the other, and a pack never has
// the second of a pair without the first.
TEST_F(ContainerPack, ConcurrentWriters_PauseShortlyAndTheLayerIsOneMoment) {
  v1::SandboxRecord record = NewRecord();
  const auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  ASSERT_TRUE(Start(*instance, "writer",
                    "mkdir /work; i=0; while true; do i=$((i+1)); echo $i > /work/one; "
                    "echo $i > /work/two; [ $i = 5 ] && echo going; done",
                    "going")
                  .ok());
  for (int round = 0; round < 5; ++round) {
    v1::PackRequest request;
    request.set_name(fmt::format("moment:{}", round));
    auto packed = Pack(*instance, request);
    ASSERT_TRUE(packed.ok()) << packed.error().ToString();
    EXPECT_LT(packed->frozen_us(), 10'000'000U);
    v1::SandboxRecord other = NewRecord();
    other.mutable_spec()->set_workspace(request.name());
    auto copy = MustCreate(other);
    ASSERT_NE(copy, nullptr);
    // `> file` empties before it writes, so either may be empty at that moment.
    const std::string pair = Out(*copy, "echo $(cat /work/one):$(cat /work/two):");
    const auto one = std::strtol(pair.c_str(), nullptr, 10);
    const auto two = std::strtol(pair.c_str() + pair.find(':') + 1, nullptr, 10);
    if (one != 0 && two != 0) EXPECT_TRUE(one == two || one == two + 1) << pair;
    EXPECT_TRUE(one != 0 || two != 0) << pair;
    copy.reset();
    EXPECT_TRUE(Destroy(other).ok());
    EXPECT_TRUE(layers_->Remove(request.name()).ok());
  }
  EXPECT_TRUE(Destroy(record).ok());
}

// What is overwritten while a copy exists is charged twice; that must not become a full disk.
TEST_F(ContainerPack, Quota_HoldsRoomForOverwritesAndComesBack) {
  v1::SandboxRecord record = NewRecord();  // 64 MiB
  auto instance = MustCreate(record);
  ASSERT_NE(instance, nullptr);
  Out(*instance, "dd if=/dev/urandom of=/data bs=1M count=44 2>/dev/null; sync");
  const uint64_t fired = fault::Fired("sandbox.pack.copied");
  ASSERT_TRUE(fault::Arm("sandbox.pack.copied=block").ok());
  auto packed = std::async(std::launch::async, [&] { return Pack(*instance); });
  ASSERT_TRUE(fault::WaitFired("sandbox.pack.copied", fired + 1, std::chrono::seconds(20)));
  EXPECT_EQ(Out(*instance,
                "dd if=/dev/urandom of=/data bs=1M count=44 conv=notrunc 2>/dev/null && echo ok"),
            "ok\n");
  fault::DisarmAll();
  const auto reply = packed.get();
  ASSERT_TRUE(reply.ok()) << reply.error().ToString();
  EXPECT_EQ(reply->layer().content_bytes(), 44U << 20);
  // The limit is back in the second sweep.
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  constexpr char kTooMuch[] = "dd if=/dev/urandom of=/more bs=1M count=60 2>/dev/null || echo full";
  EXPECT_EQ(Out(*instance, kTooMuch), "full\n");
  EXPECT_TRUE(layers_->Remove(reply->layer().id()).ok());

  // A daemon that ends between a pack and that: the next one sees to it.
  Out(*instance, "rm /more");
  const auto last = Pack(*instance);
  ASSERT_TRUE(last.ok()) << last.error().ToString();
  instance.reset();
  Open();
  instance = *Adopt(record);
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  EXPECT_THAT(*Sweep({record}), IsEmpty());
  EXPECT_EQ(Out(*instance, kTooMuch), "full\n");
  EXPECT_TRUE(Destroy(record).ok());
  EXPECT_TRUE(layers_->Remove(last->layer().id()).ok());
}

TEST_F(ContainerPack, DaemonKilled_SandboxRunsOnAndNothingIsLeft) {
  for (const char* point :
       {"sandbox.pack.frozen", "sandbox.pack.copied", "layer.publish.before_catalog"}) {
    SCOPED_TRACE(point);
    backend_.reset();
    shards_.reset();
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      layers_->AfterFork();
      shards_ = std::make_unique<runtime::Shards>(1);
      Open();
      v1::SandboxRecord record = NewRecord();
      const auto made = Create(record);
      if (!made.ok()) ::_exit(1);
      const std::string text = record.SerializeAsString();
      if (::write(ends[1], text.data(), text.size()) != static_cast<ssize_t>(text.size()))
        ::_exit(1);
      ::close(ends[1]);
      (void)Start(**made, "beat", "i=0; while sleep 0.05; do i=$((i+1)); echo beat $i; done",
                  "beat 1\n");
      (void)Run(**made, "echo x > /changed");
      if (!fault::Arm(fmt::format("{}=kill", point)).ok()) ::_exit(1);
      (void)Pack(**made);
      ::_exit(1);
    }
    ::close(ends[1]);
    std::string text;
    char buffer[4096];
    ssize_t size = 0;
    while ((size = ::read(ends[0], buffer, sizeof(buffer))) > 0)
      text.append(buffer, static_cast<size_t>(size));
    ::close(ends[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFSIGNALED(status)) << status;
    v1::SandboxRecord record;
    ASSERT_TRUE(record.ParseFromString(text));

    shards_ = std::make_unique<runtime::Shards>(2);
    Open();
    auto adopted = Adopt(record);
    ASSERT_TRUE(adopted.ok()) << adopted.error().ToString();
    EXPECT_EQ(Freezer(record), "0");
    (void)Sweep({record});
    EXPECT_THAT(Layers(), ::testing::ElementsAre(record.scratch()));
    v1::PollRequest poll;
    poll.set_op_id("beat");
    auto reply = Poll(**adopted, poll);
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    EXPECT_TRUE(reply->running());
    poll.set_stdout_offset(reply->stdout_next());
    poll.set_wait_ms(10'000);
    poll.set_max_bytes(1 << 16);
    reply = Poll(**adopted, poll);
    ASSERT_TRUE(reply.ok());
    EXPECT_GT(reply->stdout_chunks_size(), 0) << "it beats on";
    // Nothing keeps the next pack from being made.
    const auto packed = Pack(**adopted);
    ASSERT_TRUE(packed.ok()) << packed.error().ToString();
    adopted = std::shared_ptr<Instance>();
    EXPECT_TRUE(Destroy(record).ok());
    EXPECT_TRUE(layers_->Remove(packed->layer().id()).ok());
  }
}

}  // namespace
}  // namespace dsec::sandbox
