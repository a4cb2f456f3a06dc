// SPDX-License-Identifier: Apache-2.0
// Output, terminals and memory. Numbers are those of the acceptance cases.
#include <fcntl.h>
#include <signal.h>

#include "aether/exec_table.h"
#include "aether/testing/agent_test.h"

namespace dsec::aether {
namespace {

using testing::AgentTest;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::Stopwatch;

class Output : public AgentTest {};

TEST_F(Output, Case026_EndlessOutput_IsBoundedInTimeAndMemory) {
  Run("true");
  uint64_t before = box_->AgentMemoryKib("Anonymous");
  auto detached = box_->Start(box_->Argv({"yes"}));
  ASSERT_TRUE(detached.ok());
  v1::ExecRequest request = box_->Argv({"yes"});
  request.set_timeout_ms(2000);
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.result.kind(), v1::END_TIMEOUT);
  // A caller that keeps up sees more than is kept.
  EXPECT_GE(outcome.out.size(), 1u << 20);
  EXPECT_EQ(outcome.out_total - outcome.out_dropped, 1u << 20);
  EXPECT_GT(outcome.out_total, 16u << 20);
  EXPECT_LT(box_->AgentMemoryKib("Anonymous"), before + (8 << 10));
  Stopwatch watch;
  EXPECT_EQ(Run("echo ok").out, "ok\n");
  EXPECT_LT(watch.millis(), 1000);
}

TEST_F(Output, Case027_CapBoundary_IsExact) {
  for (const char* redirect : {"", " >&2"}) {
    for (uint64_t size : {9999u, 10000u, 10001u, 16384u}) {
      v1::ExecRequest request = box_->Script(fmt::format("head -c {} /dev/zero{}", size, redirect));
      request.set_output_bytes(10000);
      Outcome outcome = Run(request);
      bool err = *redirect != 0;
      EXPECT_EQ(err ? outcome.err_total : outcome.out_total, size);
      EXPECT_EQ((err ? outcome.err : outcome.out).size(), std::min<uint64_t>(size, 10000));
      EXPECT_EQ(err ? outcome.err_dropped : outcome.out_dropped,
                size - std::min<uint64_t>(size, 10000));
    }
  }
  v1::ExecRequest large = box_->Script("head -c 3000000 /dev/zero");
  large.set_output_bytes(16 << 20);
  EXPECT_EQ(Run(large).out.size(), 3000000u);
}

TEST_F(Output, Case028_HugeLine_AndBursts) {
  Outcome outcome = Run("head -c 67108864 /dev/zero | tr '\\0' x");
  EXPECT_TRUE(outcome.Exited(0));
  EXPECT_EQ(outcome.out_total, 64u << 20);
  EXPECT_EQ(outcome.out.find_first_not_of('x'), std::string::npos);
  for (int size : {33 << 10, 257 << 10, 1 << 20}) {
    EXPECT_EQ(Run(fmt::format("head -c {} /dev/zero", size)).out.size(), static_cast<size_t>(size));
  }
  EXPECT_EQ(Run("echo next").out, "next\n");
}

TEST_F(Output, Case029_Bytes_AreExact) {
  Outcome outcome = Run("head -c 1048576 /dev/urandom | tee /tmp/r");
  v1::ReadRequest read;
  read.set_path("/tmp/r");
  read.set_length(1 << 20);
  EXPECT_EQ(outcome.out, Call<v1::ReadReply>("ReadFile", read).data());
  EXPECT_EQ(Run("printf 'a\\0b\\342\\033[31m'").out, std::string("a\0b\xe2\033[31m", 9));
}

TEST_F(Output, Case031_Streams_StaySeparateAndOrdered) {
  constexpr char kCode[] = "import os\nfor i in range(1, 2001): os.write(1 + i % 2, b'%d\\n' % i)";
  std::string odd, even, all;
  for (int i = 1; i <= 2000; ++i) {
    (i % 2 == 1 ? odd : even) += fmt::format("{}\n", i);
    all += fmt::format("{}\n", i);
  }
  Outcome outcome = Run(box_->Argv({"python3", "-c", kCode}));
  EXPECT_EQ(outcome.out, even);
  EXPECT_EQ(outcome.err, odd);
  v1::ExecRequest merged = box_->Argv({"python3", "-c", kCode});
  merged.set_merged(true);
  EXPECT_EQ(Run(merged).out, all);
}

TEST_F(Output, Case032_LastBytes_AlwaysArrive) {
  for (int i = 0; i < 100; ++i) {
    bool kill = i % 2 == 0;
    Outcome outcome =
        Run(fmt::format("head -c 204800 /dev/zero; {}", kill ? "kill -9 $$" : "exit 3"));
    ASSERT_EQ(outcome.out.size(), 204800u);
    ASSERT_EQ(outcome.result.kind(), kill ? v1::END_SIGNALED : v1::END_EXITED);
  }
}

TEST_F(Output, Replay_FromAnyOffset) {
  auto reply = box_->client().Call<v1::ExecReply>(
      "Exec", box_->Script("for i in $(seq 1000); do echo $i; done"));
  ASSERT_TRUE(reply.ok());
  v1::PollRequest poll;
  poll.set_op_id(reply->op_id());
  poll.set_stdout_offset(10);
  poll.set_max_bytes(5);
  v1::ExecReply part = Call<v1::ExecReply>("Poll", poll);
  ASSERT_EQ(part.stdout_chunks_size(), 1);
  EXPECT_EQ(part.stdout_chunks(0).data(), "6\n7\n8");
  EXPECT_EQ(part.stdout_next(), 15u);
  EXPECT_FALSE(part.drained());
}

TEST_F(Output, UnreadOutput_LivesWithinTheBudgetOldestGoesFirst) {
  std::vector<std::string> ids;
  for (int i = 0; i < 8; ++i) {
    v1::ExecRequest request = box_->Script("head -c 16777216 /dev/zero");
    request.set_output_bytes(16 << 20);
    request.set_max_bytes(1);
    v1::ExecReply reply = Call<v1::ExecReply>("Exec", request);
    while (reply.running()) {
      v1::PollRequest poll;
      poll.set_op_id(request.op_id());
      poll.set_stdout_offset(reply.stdout_state().total());
      poll.set_wait_ms(10000);
      reply = Call<v1::ExecReply>("Poll", poll);
    }
    ids.push_back(request.op_id());
  }
  uint64_t kept = 0;
  for (const std::string& id : ids) {
    v1::PollRequest poll;
    poll.set_op_id(id);
    poll.set_max_bytes(1);
    v1::ExecReply reply = Call<v1::ExecReply>("Poll", poll);
    EXPECT_EQ(reply.stdout_state().total(), 16u << 20);
    kept += reply.stdout_state().total() - reply.stdout_state().dropped();
    if (id == ids.front()) EXPECT_EQ(reply.stdout_state().dropped(), 16u << 20);
    if (id == ids.back()) EXPECT_EQ(reply.stdout_state().dropped(), 0u);
  }
  EXPECT_LE(kept, ExecTable::kOutputBudget);
  EXPECT_LT(box_->AgentMemoryKib("Anonymous"), (ExecTable::kOutputBudget >> 10) + 4096);
  for (const std::string& id : ids) {
    v1::AckRequest ack;
    ack.set_op_id(id);
    Call<v1::Empty>("Ack", ack);
  }
  EXPECT_LT(box_->AgentMemoryKib("Anonymous"), 4096u);
}

// Reads a terminal until `text` has been seen; returns everything.
std::string ReadUntil(testing::AgentSandbox& box, const std::string& op_id,
                      const std::string& text) {
  std::string got;
  v1::PollRequest poll;
  poll.set_op_id(op_id);
  poll.set_wait_ms(5000);
  Stopwatch watch;
  while (got.find(text) == std::string::npos && watch.millis() < 10000) {
    auto reply = box.client().Call<v1::ExecReply>("Poll", poll);
    if (!reply.ok()) break;
    for (const v1::StreamChunk& chunk : reply->stdout_chunks()) got += chunk.data();
    poll.set_stdout_offset(reply->stdout_next());
    if (!reply->running()) break;
  }
  return got;
}

TEST_F(Output, Case035_Terminal_SizeResizeAndInput) {
  v1::ExecRequest request = box_->Script(
      "trap 'echo winch $(stty size)' WINCH; stty size; while read -r line; do echo \"got $line "
      "$(stty size)\"; done; exit 4");
  request.mutable_tty()->set_rows(40);
  request.mutable_tty()->set_cols(100);
  request.set_stdin_open(true);
  ASSERT_TRUE(box_->Start(request).ok());
  EXPECT_THAT(ReadUntil(*box_, request.op_id(), "\n"), HasSubstr("40 100"));
  v1::ResizeRequest resize;
  resize.set_op_id(request.op_id());
  for (uint32_t i = 0; i < 1000; ++i) {
    resize.mutable_tty()->set_rows(20 + i % 5);
    resize.mutable_tty()->set_cols(80);
    Call<v1::Empty>("Resize", resize);
  }
  resize.mutable_tty()->set_rows(10);
  resize.mutable_tty()->set_cols(33);
  Call<v1::Empty>("Resize", resize);
  v1::StdinRequest write;
  write.set_op_id(request.op_id());
  write.set_data("hello\n");
  Call<v1::StdinReply>("WriteStdin", write);
  EXPECT_THAT(ReadUntil(*box_, request.op_id(), "got hello 10 33"), HasSubstr("got hello 10 33"));
  write.set_offset(6);
  write.set_data("");
  write.set_eof(true);
  Call<v1::StdinReply>("WriteStdin", write);
  v1::PollRequest poll;
  poll.set_op_id(request.op_id());
  poll.set_stdout_offset(1 << 20);
  poll.set_wait_ms(5000);
  EXPECT_EQ(Call<v1::ExecReply>("Poll", poll).result().exit_code(), 4);
}

TEST_F(Output, Case036_TerminalControl_OnAPlainExecIsRefused) {
  v1::ExecRequest request = box_->Argv({"cat"});
  request.set_stdin_open(true);
  auto started = box_->Start(request);
  v1::ResizeRequest resize;
  resize.set_op_id(request.op_id());
  resize.mutable_tty()->set_rows(10);
  resize.mutable_tty()->set_cols(10);
  EXPECT_EQ(Failure("Resize", resize).reason(), "exec.no_tty");
  v1::StdinRequest write;
  write.set_op_id(request.op_id());
  write.set_data("x\x04y");
  write.set_eof(true);
  Call<v1::StdinReply>("WriteStdin", write);
  Outcome outcome = *box_->Collect(*started);
  EXPECT_TRUE(outcome.Exited(0));
  EXPECT_EQ(outcome.out, "x\x04y");
}

TEST_F(Output, Case038_TerminalHeldByAJob_EndsWithinTheDrainGrace) {
  for (const char* script : {"sleep 300 & exit 3", "nohup sleep 300 >/dev/null 2>&1 & exit 3",
                             "setsid sleep 300 & exit 3"}) {
    v1::ExecRequest request = box_->Script(script);
    request.mutable_tty()->set_rows(24);
    Stopwatch watch;
    EXPECT_TRUE(Run(request).Exited(3)) << script;
    EXPECT_LT(watch.millis(), 2000) << script;
  }
}

TEST_F(Output, Terminal_BelongsToTheUserAndIsControlling) {
  v1::ExecRequest request =
      box_->Script("stat -c %u $(tty); echo x > /dev/tty && echo tty-ok; stty size");
  request.set_user("1000");
  request.mutable_tty();
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.out, "1000\r\nx\r\ntty-ok\r\n24 80\r\n");
}

class Memory : public AgentTest {
 protected:
  void SetUp() override {
    if (auto missing = spawn::testing::WhatIsMissing()) GTEST_SKIP() << *missing;
    v1::HelloRequest hello;
    hello.set_memory_limit_bytes(kLimit);
    Make({.memory_bytes = kLimit, .pids = 0, .cpu_millis = 0}, hello);
  }
  static constexpr uint64_t kLimit = 128u << 20;
  static constexpr char kGreedy[] = "python3 -c 'x=bytearray(10**9)'";
};

TEST_F(Memory, Case056_Oom_IsNamedAndOnlyWhenTrue) {
  Outcome oom = Run(box_->Argv({"python3", "-c", "x=bytearray(10**9)"}));
  EXPECT_EQ(oom.result.kind(), v1::END_OOM_KILLED);
  EXPECT_EQ(oom.result.limit(), kLimit);
  EXPECT_THAT(oom.result.oom_victim(), HasSubstr("python3"));
  EXPECT_GT(oom.result.peak_memory_bytes(), kLimit / 2);
  EXPECT_GE(oom.result.oom_events(), 1u);
  Outcome killed = Run("kill -9 $$");
  EXPECT_EQ(killed.result.kind(), v1::END_SIGNALED);
  EXPECT_EQ(killed.result.oom_events(), 0u);
  EXPECT_TRUE(Run("exit 137").Exited(137));
}

TEST_F(Memory, Case057_ChildIsTheVictim_CommandGoesOnOrTheGroupEnds) {
  Outcome alone = Run(fmt::format("{}; echo rc=$?; echo alive", kGreedy));
  EXPECT_TRUE(alone.Exited(0));
  EXPECT_EQ(alone.out, "rc=137\nalive\n");
  EXPECT_EQ(alone.result.oom_events(), 1u);
  EXPECT_THAT(alone.result.oom_victim(), HasSubstr("python3"));
  v1::ExecRequest group = box_->Script(fmt::format("{}; sleep 60; echo alive", kGreedy));
  group.set_group_kill(true);
  Stopwatch watch;
  Outcome whole = Run(group);
  EXPECT_EQ(whole.result.kind(), v1::END_OOM_KILLED);
  EXPECT_EQ(whole.out, "");
  EXPECT_LT(watch.millis(), 5000);
  EXPECT_EQ(Run("echo ok").out, "ok\n");
}

TEST_F(Memory, Oom_InASessionEndsTheChildOrTheShell) {
  auto in = [&](const std::string& script) {
    v1::ExecRequest request = box_->Script(script);
    request.set_session("s");
    return Run(request);
  };
  Outcome child = in(std::string("A=1; ") + kGreedy);
  EXPECT_TRUE(child.Exited(137));
  EXPECT_EQ(child.result.oom_events(), 1u);
  EXPECT_EQ(in("echo $A").out, "1\n");
}

TEST_F(Output, PidsLimit_IsReported) {
  Make({.memory_bytes = 0, .pids = 40, .cpu_millis = 0}, {});
  Outcome outcome =
      Run("for i in $(seq 60); do sleep 5 & done 2>/dev/null; kill $(jobs -p) 2>/dev/null; true");
  EXPECT_TRUE(outcome.result.pids_limit_hit());
  EXPECT_FALSE(Run("true").result.pids_limit_hit());
}

TEST_F(Output, Case072_Throttling_IsReported) {
  Make({.memory_bytes = 0, .pids = 0, .cpu_millis = 200}, {});
  Outcome outcome = Run("timeout 1 sh -c 'while :; do :; done'");
  EXPECT_GT(outcome.result.throttled_usec(), 100000u);
}

TEST_F(Output, Idle_PrivateMemoryIsTinyAndThreadsAreGone) {
  for (int i = 0; i < 5; ++i) Run("echo hi");
  v1::PathRequest stat;
  stat.set_path("/etc");
  Call<v1::FileInfo>("Stat", stat);
  ::sleep(4);  // the idle times of workers and of trimming are what is under test
  EXPECT_LT(box_->AgentMemoryKib("Anonymous"), 300u);
  std::printf("[ MEASURED ] idle agent: %lu KiB anonymous, %lu KiB rss, %lu KiB pss\n",
              box_->AgentMemoryKib("Anonymous"), box_->AgentMemoryKib("Rss"),
              box_->AgentMemoryKib("Pss"));
  auto status =
      os::ReadFile(AT_FDCWD, fmt::format("/proc/{}/status", box_->agent_pid()).c_str(), 1 << 16);
  EXPECT_THAT(*status, HasSubstr("Threads:\t1\n"));
}

TEST_F(Output, RoundTrip_IsMeasured) {
  std::vector<int64_t> micros;
  for (int i = 0; i < 200; ++i) {
    v1::ExecRequest request = box_->Argv({"/bin/true"});
    MonoTime start = Clock::System().Mono();
    ASSERT_TRUE(box_->client().Call<v1::ExecReply>("Exec", request).ok());
    micros.push_back(
        std::chrono::duration_cast<std::chrono::microseconds>(Clock::System().Mono() - start)
            .count());
    v1::AckRequest ack;
    ack.set_op_id(request.op_id());
    Call<v1::Empty>("Ack", ack);
  }
  std::ranges::sort(micros);
  std::printf("[ MEASURED ] exec of /bin/true at the socket: p50 %ld us, p99 %ld us\n", micros[100],
              micros[198]);
  EXPECT_LT(micros[100], 20000);
}

}  // namespace
}  // namespace dsec::aether
