// SPDX-License-Identifier: Apache-2.0
// Execs through the agent's socket, with the real spawner, init and kernel. Numbers are those of
// the acceptance cases.
#include <signal.h>

#include <set>

#include "aether/testing/agent_test.h"

namespace dsec::aether {
namespace {

using testing::AgentTest;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::Stopwatch;

class Exec : public AgentTest {};

TEST_F(Exec, Argv_RunsOnceAndTellsAll) {
  Outcome outcome = Run(box_->Argv({"sh", "-c", "echo out; echo err >&2; exit 3"}));
  EXPECT_TRUE(outcome.Exited(3));
  EXPECT_EQ(outcome.out, "out\n");
  EXPECT_EQ(outcome.err, "err\n");
  EXPECT_GT(outcome.result.wall_usec(), 0u);
  EXPECT_GT(outcome.result.user_usec() + outcome.result.system_usec(), 0u);
  EXPECT_FALSE(outcome.result.left_processes());
  EXPECT_TRUE(CgroupsGone());
}

TEST_F(Exec, ShortCommand_TakesOneRoundTrip) {
  auto reply = box_->client().Call<v1::ExecReply>("Exec", box_->Script("echo hi; echo there"));
  ASSERT_TRUE(reply.ok());
  EXPECT_FALSE(reply->running());
  EXPECT_TRUE(reply->drained());
  ASSERT_EQ(reply->stdout_chunks_size(), 1);
  EXPECT_EQ(reply->stdout_chunks(0).data(), "hi\nthere\n");
}

TEST_F(Exec, SameOpId_NeverRunsTwice) {
  v1::ExecRequest request = box_->Script("echo x >> /tmp/ran; cat /tmp/ran");
  request.set_request_digest("digest");
  auto first = box_->client().Call<v1::ExecReply>("Exec", request);
  auto second = box_->client().Call<v1::ExecReply>("Exec", request);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_FALSE(first->known());
  EXPECT_TRUE(second->known());
  EXPECT_EQ(second->stdout_chunks(0).data(), "x\n");
  request.set_request_digest("another");
  Error error = Failure("Exec", request);
  EXPECT_EQ(error.code(), Code::kAlreadyExists);
  EXPECT_EQ(error.reason(), "exec.op_id_reused");
}

TEST_F(Exec, Case001_BackgroundChildKeepsStdout_ReturnsAfterTheDrainGrace) {
  for (bool tty : {false, true}) {
    v1::ExecRequest request = box_->Argv({"sh", "-c", "sleep 300 & echo ok"});
    if (tty) request.mutable_tty()->set_rows(24);
    request.set_timeout_ms(10000);
    Stopwatch watch;
    Outcome outcome = Run(request);
    EXPECT_LT(watch.millis(), 2000);
    EXPECT_TRUE(outcome.Exited(0));
    EXPECT_EQ(outcome.out, tty ? "ok\r\n" : "ok\n");
    if (!tty) EXPECT_TRUE(outcome.result.left_processes());
  }
  Outcome first = Run("(sleep 0.5; echo late) & echo now");
  EXPECT_EQ(first.out, "now\n");
  Outcome second = Run("sleep 1; echo next");
  EXPECT_EQ(second.out, "next\n");
}

TEST_F(Exec, Case002_Daemon_OutlivesItsExecAndKeepsPrinting) {
  Outcome outcome =
      Run("setsid nohup sh -c 'while :; do date >> /tmp/beat; echo noise; sleep 0.1; done' 2>&1 &");
  EXPECT_TRUE(outcome.Exited(0));
  EXPECT_TRUE(outcome.result.left_processes());
  EXPECT_EQ(
      Run("a=$(wc -l < /tmp/beat); sleep 1; b=$(wc -l < /tmp/beat); test $b -gt $a && echo alive")
          .out,
      "alive\n");
}

TEST_F(Exec, Case003_Timeout_KillsTheWholeTreeAndNothingElse) {
  auto other = box_->Start(box_->Argv({"sleep", "600"}));
  ASSERT_TRUE(other.ok());
  v1::ExecRequest request = box_->Script(
      "setsid sh -c 'trap : TERM; while :; do echo x >> /tmp/g; sleep 0.2; done' & (nohup sleep "
      "999 &) ; "
      "while :; do :; done");
  request.set_timeout_ms(1000);
  Stopwatch watch;
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.result.kind(), v1::END_TIMEOUT);
  EXPECT_EQ(outcome.result.limit(), 1000u);
  EXPECT_GE(watch.millis(), 1000);
  EXPECT_LT(watch.millis(), 2500);
  EXPECT_FALSE(outcome.result.left_processes());
  EXPECT_EQ(Run("a=$(wc -c < /tmp/g); sleep 0.6; test $a = $(wc -c < /tmp/g) && echo stopped").out,
            "stopped\n");
  v1::PollRequest poll;
  poll.set_op_id(other->op_id());
  EXPECT_TRUE(Call<v1::ExecReply>("Poll", poll).running());
  EXPECT_EQ(box_->ExecCgroups().size(), 1u);
}

TEST_F(Exec, Case004_TimeoutAndCancel_ArePromptAndFinal) {
  v1::ExecRequest request = box_->Script("sleep 2; touch /tmp/late");
  request.set_timeout_ms(300);
  Stopwatch watch;
  EXPECT_EQ(Run(request).result.kind(), v1::END_TIMEOUT);
  EXPECT_LT(watch.millis(), 800);
  auto started = box_->Start(box_->Script("sleep 2; touch /tmp/late"));
  ASSERT_TRUE(started.ok());
  Stopwatch cancel_watch;
  v1::SignalRequest cancel;
  cancel.set_op_id(started->op_id());
  cancel.set_killed_by("cancel");
  Call<v1::Empty>("Signal", cancel);
  auto outcome = box_->Collect(*started);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->result.kind(), v1::END_KILLED);
  EXPECT_EQ(outcome->result.killed_by(), "cancel");
  EXPECT_LT(cancel_watch.millis(), 1000);
  EXPECT_EQ(Run("sleep 2; ls /tmp/late").err,
            "ls: cannot access '/tmp/late': No such file or directory\n");
}

TEST_F(Exec, Case005_ConnectionsComeAndGo_CommandsAndOutputStay) {
  v1::ExecRequest request = box_->Script("echo before; sleep 0.5; echo after");
  request.set_wait_ms(0);
  {
    auto old = box_->Connect();
    ASSERT_TRUE(old.ok());
    ASSERT_TRUE((*old)->Call<v1::ExecReply>("Exec", request).ok());
  }
  auto fresh = box_->Connect();
  ASSERT_TRUE(fresh.ok());
  auto list = (*fresh)->Call<v1::ListExecsReply>("ListExecs", v1::Empty());
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->execs_size(), 1);
  EXPECT_EQ(list->execs(0).op_id(), request.op_id());
  EXPECT_TRUE(list->execs(0).running());
  v1::PollRequest poll;
  poll.set_op_id(request.op_id());
  poll.set_wait_ms(0);
  auto reply = box_->client().Call<v1::ExecReply>("Poll", poll);
  ASSERT_TRUE(reply.ok());
  auto outcome = box_->Collect(*reply);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->out, "before\nafter\n");
}

TEST_F(Exec, Case006_PartialOutput_SurvivesATimeout) {
  v1::ExecRequest request =
      box_->Script("for i in 1 2 3; do echo $i; echo e$i >&2; done; sleep 60");
  request.set_timeout_ms(500);
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.result.kind(), v1::END_TIMEOUT);
  EXPECT_EQ(outcome.out, "1\n2\n3\n");
  EXPECT_EQ(outcome.err, "e1\ne2\ne3\n");
}

TEST_F(Exec, Case007_NoStdin_IsEndOfFile) {
  Stopwatch watch;
  EXPECT_EQ(Run("cat; echo done").out, "done\n");
  EXPECT_LT(watch.millis(), 1000);
}

TEST_F(Exec, Case008_Stdin_ManyBytesNobodyReadingAndHalfClosed) {
  v1::ExecRequest request = box_->Argv({"sh", "-c", "wc -c; "});
  request.set_stdin_open(true);
  request.set_stdin("first");
  auto started = box_->Start(request);
  ASSERT_TRUE(started.ok());
  v1::StdinRequest write;
  write.set_op_id(request.op_id());
  constexpr uint64_t kTotal = 64u << 20;
  std::string data(1 << 20, 'z');
  uint64_t offset = 5;
  while (offset < kTotal) {
    write.set_offset(offset);
    write.set_data(data.substr(0, std::min<uint64_t>(data.size(), kTotal - offset)));
    auto reply = box_->client().Call<v1::StdinReply>("WriteStdin", write);
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    ASSERT_FALSE(reply->closed());
    offset = reply->accepted();
  }
  write.set_offset(offset);
  write.clear_data();
  write.set_eof(true);
  Call<v1::StdinReply>("WriteStdin", write);
  auto outcome = box_->Collect(*started);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->out, fmt::format("{}\n", kTotal));

  v1::ExecRequest deaf = box_->Argv({"true"});
  deaf.set_stdin_open(true);
  started = box_->Start(deaf);
  ASSERT_TRUE(started.ok());
  write.set_op_id(deaf.op_id());
  write.set_eof(false);
  write.set_data(data);
  bool closed = false;
  for (offset = 0; !closed && offset < kTotal;) {
    write.set_offset(offset);
    v1::StdinReply reply = Call<v1::StdinReply>("WriteStdin", write);
    offset = reply.accepted();
    closed = reply.closed();
  }
  EXPECT_TRUE(closed);
  EXPECT_TRUE(box_->Collect(*started)->Exited(0));

  v1::ExecRequest cat = box_->Argv({"cat"});
  cat.set_stdin("a\n");
  Outcome echoed = Run(cat);
  EXPECT_TRUE(echoed.Exited(0));
  EXPECT_EQ(echoed.out, "a\n");
}

TEST_F(Exec, Stdin_RepeatsAreIgnoredAndGapsRefused) {
  v1::ExecRequest request = box_->Argv({"cat"});
  request.set_stdin_open(true);
  auto started = box_->Start(request);
  ASSERT_TRUE(started.ok());
  v1::StdinRequest write;
  write.set_op_id(request.op_id());
  write.set_data("abc");
  EXPECT_EQ(Call<v1::StdinReply>("WriteStdin", write).accepted(), 3u);
  write.set_data("abcde");
  EXPECT_EQ(Call<v1::StdinReply>("WriteStdin", write).accepted(), 5u);
  write.set_offset(9);
  EXPECT_EQ(Failure("WriteStdin", write).reason(), "exec.stdin_gap");
  write.set_offset(5);
  write.set_data("");
  write.set_eof(true);
  Call<v1::StdinReply>("WriteStdin", write);
  EXPECT_EQ(box_->Collect(*started)->out, "abcde");
}

TEST_F(Exec, Case014_Ends_AreNotAmbiguous) {
  EXPECT_TRUE(Run("true").Exited(0));
  EXPECT_TRUE(Run("exit 255").Exited(255));
  EXPECT_TRUE(Run("exit 137").Exited(137));
  Outcome killed = Run("kill -9 $$");
  EXPECT_EQ(killed.result.kind(), v1::END_SIGNALED);
  EXPECT_EQ(killed.result.signal(), SIGKILL);
  Outcome crashed = Run("kill -SEGV $$");
  EXPECT_EQ(crashed.result.kind(), v1::END_SIGNALED);
  EXPECT_EQ(crashed.result.signal(), SIGSEGV);
  Run("touch /tmp/plain; printf '#!/no/such/interpreter\\n' > /tmp/badinterp; chmod +x "
      "/tmp/badinterp");
  struct Bad {
    const char* program;
    int sys_errno;
  };
  for (const Bad& bad :
       {Bad{"/no/such", ENOENT}, Bad{"no-such-program", ENOENT}, Bad{"/tmp", EACCES},
        Bad{"/tmp/plain", EACCES}, Bad{"/tmp/badinterp", ENOENT}}) {
    Outcome outcome = Run(box_->Argv({bad.program}));
    EXPECT_EQ(outcome.result.kind(), v1::END_SPAWN_ERROR) << bad.program;
    EXPECT_EQ(outcome.result.spawn_step(), "exec") << bad.program;
    EXPECT_EQ(outcome.result.sys_errno(), bad.sys_errno) << bad.program;
  }
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(Run(box_->Argv({"false"})).Exited(1));
  EXPECT_TRUE(CgroupsGone());
}

TEST_F(Exec, Case015_BadWorkingDirectory_SameWithAndWithoutTerminal) {
  Run("echo x > /tmp/afile; mkdir -m 700 /tmp/secret; mkdir /tmp/only-inside");
  for (bool tty : {false, true}) {
    auto run = [&](const char* cwd, const char* user) {
      v1::ExecRequest request = box_->Argv({"pwd"});
      request.set_cwd(cwd);
      request.set_user(user);
      if (tty) request.mutable_tty()->set_rows(24);
      return Run(request);
    };
    for (auto [cwd, user] :
         {std::pair{"/no/such", ""}, {"/tmp/afile", ""}, {"/tmp/secret", "1000"}}) {
      Outcome outcome = run(cwd, user);
      EXPECT_EQ(outcome.result.kind(), v1::END_SPAWN_ERROR) << cwd;
      EXPECT_EQ(outcome.result.spawn_step(), "cwd") << cwd;
      EXPECT_EQ(outcome.out, "");
    }
    EXPECT_THAT(run("/tmp/only-inside", "").out, HasSubstr("/tmp/only-inside"));
  }
}

TEST_F(Exec, Case016_LargeScriptAndArguments) {
  std::string script = "echo start\n#" + std::string(1 << 20, 'x') + "\necho end\n";
  EXPECT_EQ(Run(script).out, "start\nend\n");
  EXPECT_EQ(Run(box_->Argv({"sh", "-c", "echo ${#1}", "sh", std::string(131071, 'x')})).out,
            "131071\n");
  Error error = Failure("Exec", box_->Argv({"echo", std::string(131072, 'x')}));
  EXPECT_EQ(error.code(), Code::kInvalidArgument);
  EXPECT_EQ(error.reason(), "exec.too_long");
}

TEST_F(Exec, Case017_Environment_IsExact) {
  v1::ExecRequest request = box_->Argv({"env", "-0"});
  auto add = [&](const std::string& key, const std::string& value) {
    v1::KeyValue& pair = *request.add_env();
    pair.set_key(key);
    pair.set_value(value);
  };
  add("NEWLINE", "a\nb");
  add("EQUALS", "a=b");
  add("EMPTY", "");
  add("BYTES", "\xff\xfe");
  add("A; touch /PWNED #", "x");
  for (int i = 0; i < 10000; ++i) add(fmt::format("V{}", i), "1");
  Outcome outcome = Run(request);
  std::set<std::string> lines;
  for (size_t start = 0; start < outcome.out.size();) {
    size_t end = outcome.out.find('\0', start);
    lines.insert(outcome.out.substr(start, end - start));
    start = end + 1;
  }
  for (const char* line : {"NEWLINE=a\nb", "EQUALS=a=b", "EMPTY=", "BYTES=\xff\xfe",
                           "A; touch /PWNED #=x", "V9999=1", "HOME=/root"}) {
    EXPECT_TRUE(lines.contains(line)) << line;
  }
  EXPECT_TRUE(Run("test ! -e /PWNED").Exited(0));
}

TEST_F(Exec, Case018_ScriptAndStdin_AreInNoArgvAndNoDescriptorOfChildren) {
  v1::ExecRequest request =
      box_->Script("cat /proc/*/cmdline | tr '\\0' ' '; ls /proc/self/fd; : canary3");
  request.set_stdin("canary2");
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.out.find("canary3"), std::string::npos);
  EXPECT_THAT(outcome.out, HasSubstr("0\n1\n2\n3\n"));  // 3 is the directory that ls reads
  EXPECT_EQ(outcome.out.find("4\n"), std::string::npos);
}

TEST_F(Exec, Case019_ManyAtOnce_NoneMixedUp) {
  std::vector<std::pair<int, uint32_t>> calls;
  for (int i = 0; i < 200; ++i) {
    auto stream =
        box_->client().Send("Exec", box_->Script(fmt::format("echo {}; exit {}", i, i % 256)));
    ASSERT_TRUE(stream.ok());
    calls.emplace_back(i, *stream);
  }
  for (auto [number, stream] : calls) {
    auto reply = box_->client().Receive<v1::ExecReply>(stream);
    ASSERT_TRUE(reply.ok()) << reply.error().ToString();
    auto outcome = box_->Collect(*reply);
    ASSERT_TRUE(outcome.ok());
    EXPECT_EQ(outcome->out, fmt::format("{}\n", number));
    EXPECT_TRUE(outcome->Exited(number % 256));
  }
  Stopwatch watch;
  std::vector<uint32_t> sleeps;
  for (int i = 0; i < 70; ++i)
    sleeps.push_back(*box_->client().Send("Exec", box_->Argv({"sleep", "1"})));
  for (uint32_t stream : sleeps)
    EXPECT_EQ(box_->client().Receive<v1::ExecReply>(stream)->result().kind(), v1::END_EXITED);
  EXPECT_LT(watch.millis(), 6000);
}

TEST_F(Exec, Case022_Shutdown_TermThenKill) {
  auto stubborn = box_->Start(
      box_->Script("trap '' TERM; sh -c 'trap \"\" TERM; sleep 1000' & wait; sleep 1000"));
  auto gentle = box_->Start(
      box_->Script("trap 'echo bye > /tmp/bye; exit 0' TERM; while :; do sleep 0.1; done"));
  ASSERT_TRUE(stubborn.ok() && gentle.ok());
  ASSERT_EQ(Run("sleep 0.3; echo up").out, "up\n");
  v1::ShutdownRequest request;
  request.set_grace_ms(1000);
  Stopwatch watch;
  Call<v1::Empty>("Shutdown", request);
  EXPECT_GE(watch.millis(), 950);
  EXPECT_LT(watch.millis(), 2500);
  for (const auto* reply : {&*stubborn, &*gentle}) {
    auto outcome = box_->Collect(*reply);
    ASSERT_TRUE(outcome.ok());
    EXPECT_EQ(outcome->result.kind(), v1::END_KILLED);
    EXPECT_EQ(outcome->result.killed_by(), "stop");
  }
  v1::ReadRequest read;
  read.set_path("/tmp/bye");
  read.set_length(100);
  EXPECT_EQ(Call<v1::ReadReply>("ReadFile", read).data(), "bye\n");
  EXPECT_EQ(Failure("Exec", box_->Script("true")).reason(), "sandbox.stopping");
}

TEST_F(Exec, Signal_ReachesTheFirstProcessOrTheTree) {
  auto started = box_->Start(
      box_->Script("trap 'echo usr1; exit 7' USR1; echo up; while :; do sleep 0.05; done"));
  ASSERT_TRUE(started.ok());
  v1::PollRequest poll;
  poll.set_op_id(started->op_id());
  poll.set_wait_ms(5000);
  EXPECT_THAT(Call<v1::ExecReply>("Poll", poll).stdout_chunks(0).data(), HasSubstr("up"));
  v1::SignalRequest signal;
  signal.set_op_id(started->op_id());
  signal.set_signal(SIGUSR1);
  Call<v1::Empty>("Signal", signal);
  auto outcome = box_->Collect(*started);
  EXPECT_EQ(outcome->out, "up\nusr1\n");
  EXPECT_TRUE(outcome->Exited(7));
  signal.set_op_id("unknown");
  EXPECT_EQ(Failure("Signal", signal).reason(), "exec.not_found");
}

TEST_F(Exec, User_ByNameAndNumberWithGroupsAndHome) {
  Run("echo 'alice:x:1234:1235::/tmp/alice:/bin/sh' >> /etc/passwd; echo 'extra:x:77:alice' >> "
      "/etc/group");
  v1::ExecRequest named =
      box_->Script("id -u; id -G; echo $HOME $USER; touch /tmp/mine; stat -c %u /tmp/mine");
  named.set_user("alice");
  EXPECT_EQ(Run(named).out, "1234\n1235 77\n/tmp/alice alice\n1234\n");
  v1::ExecRequest numbered = box_->Script("id -u; id -g; echo $HOME");
  numbered.set_user("4321:99");
  EXPECT_EQ(Run(numbered).out, "4321\n99\n/\n");
  v1::ExecRequest unknown = box_->Script("id");
  unknown.set_user("nobody-knows");
  Outcome outcome = Run(unknown);
  EXPECT_EQ(outcome.result.kind(), v1::END_SPAWN_ERROR);
  EXPECT_EQ(outcome.result.spawn_step(), "user");
}

TEST_F(Exec, Case049_Orphans_AreReapedAndNoZombieIsLeft) {
  Outcome outcome =
      Run("for i in $(seq 1000); do (true &); done; sleep 0.5; grep -c '^State:.Z' "
          "/proc/[0-9]*/status | "
          "grep -c ':1$'; true");
  EXPECT_EQ(outcome.out, "0\n");
}

TEST_F(Exec, Case055_CrashDumps_AreNotMade) {
  Outcome outcome =
      Run("ulimit -c unlimited 2>/dev/null; cd /tmp; sh -c 'kill -SEGV $$'; echo $?; ls /tmp/core* "
          "2>/dev/null");
  EXPECT_THAT(outcome.out, ::testing::StartsWith("139\n"));
  EXPECT_EQ(outcome.out.find("core"), std::string::npos);
}

TEST_F(Exec, Case072_CpuTime_OfTheWholeTreeOnly) {
  Outcome busy = Run("for i in 1 2; do (timeout 0.3 sh -c 'while :; do :; done') & done; wait");
  EXPECT_GT(busy.result.user_usec() + busy.result.system_usec(), 150000u);
  Outcome next = Run("true");
  EXPECT_LT(next.result.user_usec() + next.result.system_usec(), 100000u);
}

TEST_F(Exec, WrongToken_ClosesTheChannel) {
  auto stranger = testing::Client::Connect(box_->sandbox().socket_path());
  ASSERT_TRUE(stranger.ok());
  v1::HelloRequest hello;
  hello.set_token(std::string(32, 'x'));
  auto reply = (*stranger)->Call<v1::HelloReply>("Hello", hello);
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().reason(), "agent.bad_token");
  EXPECT_EQ((*stranger)->Call<v1::HelloReply>("Hello", hello).error().reason(), "test.closed");
  auto early = testing::Client::Connect(box_->sandbox().socket_path());
  EXPECT_EQ((*early)->Call<v1::ExecReply>("Exec", box_->Script("true")).error().reason(),
            "agent.hello_first");
  EXPECT_EQ(Run("echo fine").out, "fine\n");
}

}  // namespace
}  // namespace dsec::aether
