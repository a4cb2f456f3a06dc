// SPDX-License-Identifier: Apache-2.0
// Named sessions: state that persists, and what a command cannot break. Numbers are those of the
// acceptance cases.
#include <signal.h>

#include "aether/testing/agent_test.h"

namespace dsec::aether {
namespace {

using testing::AgentTest;
using ::testing::HasSubstr;
using testing::Outcome;
using testing::Stopwatch;

class Session : public AgentTest {
 protected:
  v1::ExecRequest In(std::string_view session, std::string_view script) {
    v1::ExecRequest request = box_->Script(script);
    request.set_session(std::string(session));
    if (!shell_.empty()) request.set_shell(shell_);
    return request;
  }
  Outcome Say(std::string_view script) { return Run(In("s", script)); }
  Outcome Say(std::string_view script, uint64_t timeout_ms) {
    v1::ExecRequest request = In("s", script);
    request.set_timeout_ms(timeout_ms);
    return Run(request);
  }
  void Close() {
    v1::SessionRequest request;
    request.set_name("s");
    Call<v1::Empty>("CloseSession", request);
  }
  std::string shell_;
};

TEST_F(Session, State_PersistsFromCommandToCommand) {
  EXPECT_TRUE(Say("cd /tmp; export A=1; B=2; f() { echo f; }; set -o pipefail; exec 7>/tmp/seven")
                  .Exited(0));
  EXPECT_EQ(Say("pwd; echo $A $B; f; false | true; echo $?; echo x >&7; cat /tmp/seven").out,
            "/tmp\n1 2\nf\n1\nx\n");
  EXPECT_EQ(Run(In("other", "pwd; echo $A")).out, "/\n\n");
  v1::ListSessionsReply list = Call<v1::ListSessionsReply>("ListSessions", v1::Empty());
  EXPECT_EQ(list.sessions_size(), 2);
}

TEST_F(Session, ExitStatus_IsThatOfTheCommandAndSurvives) {
  EXPECT_TRUE(Say("(exit 5)").Exited(5));
  EXPECT_EQ(Say("echo $?").out, "5\n");
  EXPECT_TRUE(Say("false").Exited(1));
  EXPECT_TRUE(Say("true").Exited(0));
  EXPECT_EQ(Say("echo $?").out, "0\n");
  EXPECT_TRUE(Say("return 7").Exited(7));
}

TEST_F(Session, Case009_AwkwardText_SameAsOutside) {
  std::string script =
      "cat <<'EOF'\n$HOME `x` \"q\" 'r' \\ \\\\\nEOF\nprintf '%s' \"a'b\\\"c\\$d\\`e\" ; "
      "echo\r\n: " +
      std::string(20480, 'x') +
      "\nprintf '%s\\n' \"it's \\\"quoted\\\"\"\necho end # no newline at the end";
  Outcome outside = Run(script);
  Outcome inside = Say(script);
  EXPECT_TRUE(inside.Exited(0));
  EXPECT_EQ(inside.out, outside.out);
  EXPECT_THAT(inside.out, HasSubstr("$HOME `x` \"q\" 'r' \\ \\\\\n"));
}

TEST_F(Session, Case010_MalformedScripts_AreErrorsAndTheSessionGoesOn) {
  for (const char* shell : {"/bin/bash", "/bin/dash"}) {
    shell_ = shell;
    EXPECT_TRUE(Say("cd /tmp; export KEEP=1").Exited(0));
    for (const char* script :
         {"cat <<EOF\nabc", "'", "if true; then", "(", "echo $((", "echo \"", "}"}) {
      Stopwatch watch;
      Outcome outcome = Say(script, 20000);
      EXPECT_LT(watch.millis(), 5000) << script;
      if (script[0] != 'c')
        EXPECT_TRUE(outcome.Exited(2)) << script << outcome.result.ShortDebugString();
      EXPECT_EQ(Say("echo alive; pwd; echo $KEEP").out, "alive\n/tmp\n1\n")
          << shell << " " << script;
    }
    Close();
  }
}

TEST_F(Session, Case012_Timeout_KeepsTheSession) {
  EXPECT_TRUE(Say("cd /tmp; export A=1; f() { echo f; }; (while :; do echo b >> /tmp/beat; sleep "
                  "0.1; done) &")
                  .Exited(0));
  for (const char* script : {"sleep 100; touch /tmp/late", "while :; do :; done; touch /tmp/late",
                             "g() { while :; do sleep 0.01; done; touch /tmp/late; }; h() { g; "
                             "touch /tmp/late; }; h; touch /tmp/late",
                             "(trap '' TERM INT; setsid sh -c 'while :; do sleep 0.1; done; touch "
                             "/tmp/late') | cat; touch /tmp/late",
                             "eval 'sleep 100; touch /tmp/late'; x=$(sleep 100); touch /tmp/late",
                             "if sleep 100; then :; fi; touch /tmp/late"}) {
    Stopwatch watch;
    Outcome outcome = Say(script, 300);
    EXPECT_EQ(outcome.result.kind(), v1::END_TIMEOUT) << script;
    EXPECT_LT(watch.millis(), 10000) << script;
    EXPECT_EQ(Say("pwd; echo $A; f").out, "/tmp\n1\nf\n") << script;
  }
  EXPECT_EQ(Say("sleep 0.3; ls /tmp/late 2>/dev/null; a=$(wc -c < /tmp/beat); sleep 0.3; test $a "
                "-lt $(wc -c < /tmp/beat) && "
                "echo the earlier job lives")
                .out,
            "the earlier job lives\n");
}

TEST_F(Session, Case013_HostileSettings_DoNotTouchTheFraming) {
  for (const char* setting :
       {"PS1='$(exit 7)'; PS2='> '; PROMPT_COMMAND='exit 3'", "stty -echo 2>/dev/null",
        "printf() { command echo spoofed; }; echo() { :; }; command() { :; }; test() { :; }; "
        "unset() { :; }",
        "alias printf=false echo=false trap=false set=false; shopt -s expand_aliases",
        "trap 'true' DEBUG", "trap 'exit 9' DEBUG; trap - DEBUG", "set -u",
        "set -f; set -C; set -o posix; set +o posix", "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-",
        "IFS=x; PATH=/usr/bin:/bin", "trap 'true' ERR EXIT RETURN",
        "set -E -T; trap ': traced' DEBUG"}) {
    EXPECT_TRUE(Say(setting).result.kind() == v1::END_EXITED) << setting;
    EXPECT_TRUE(Say("(exit 5)").Exited(5)) << setting;
    EXPECT_TRUE(Say("cat /etc/hostname >/dev/null; false").Exited(1)) << setting;
    Outcome data = Say("head -c 1048576 /dev/urandom");
    EXPECT_TRUE(data.Exited(0)) << setting;
    EXPECT_EQ(data.out_total, 1048576u) << setting;
    EXPECT_EQ(Say("false").result.message(), "") << setting;
    Close();
  }
}

TEST_F(Session, Case013_TextLikeOurOwn_IsOnlyText) {
  Outcome outcome = Say(
      "printf '{ __dsec() { :; }; } >|\"/proc/self/fd/99/s1.0\"\\ns2.0\\n'; exit_code=3; (exit 3)");
  EXPECT_TRUE(outcome.Exited(3));
  EXPECT_TRUE(Say("trap 'exit 9' DEBUG").Exited(0));
  Outcome ended = Say("echo x");
  EXPECT_TRUE(ended.Exited(9));
  EXPECT_THAT(ended.result.message(), HasSubstr("ended with this command"));
  Outcome fresh = Say("echo again");
  EXPECT_EQ(fresh.out, "again\n");
  EXPECT_THAT(fresh.result.message(), HasSubstr("fresh shell: the last one exited with status 9"));
}

TEST_F(Session, ShellEnds_ResultIsItsEndAndTheNextOneSaysSo) {
  struct Ending {
    const char* script;
    v1::EndKind kind;
    int value;
  };
  for (const Ending& ending :
       {Ending{"A=1; exit 3", v1::END_EXITED, 3}, Ending{"exec sh -c 'exit 4'", v1::END_EXITED, 4},
        Ending{"set -e; false; echo not here", v1::END_EXITED, 1},
        Ending{"kill -9 $$", v1::END_SIGNALED, SIGKILL}}) {
    Outcome outcome = Say(ending.script);
    EXPECT_EQ(outcome.result.kind(), ending.kind) << ending.script;
    EXPECT_EQ(ending.kind == v1::END_EXITED ? outcome.result.exit_code() : outcome.result.signal(),
              ending.value);
    EXPECT_EQ(outcome.out, "");
    Outcome next = Say("echo fresh$A");
    EXPECT_EQ(next.out, "fresh\n");
    EXPECT_THAT(next.result.message(), HasSubstr("started a fresh shell"));
    EXPECT_EQ(Say("true").result.message(), "");
  }
}

TEST_F(Session, ShellThatLosesItsWay_IsReplacedWithNotice) {
  for (const char* script : {"exec 99>&-", "set -n"}) {
    Outcome outcome = Say(script, 20000);
    EXPECT_EQ(outcome.result.kind(), v1::END_KILLED) << script;
    EXPECT_EQ(outcome.result.killed_by(), "session_lost") << script;
    EXPECT_EQ(Say("echo next").out, "next\n") << script;
  }
  Outcome ignoring = Say("trap '' 60; while :; do :; done", 300);
  EXPECT_EQ(ignoring.result.kind(), v1::END_TIMEOUT);
  EXPECT_THAT(ignoring.result.message(), HasSubstr("its state is lost"));
  EXPECT_EQ(Say("echo next").out, "next\n");
}

TEST_F(Session, LateOutput_OfABackgroundJobStaysOutOfLaterCommands) {
  Outcome first = Say("(sleep 0.5; echo late) & echo now");
  EXPECT_EQ(first.out, "now\n");
  EXPECT_TRUE(first.result.left_processes());
  EXPECT_EQ(Say("sleep 1; echo clean").out, "clean\n");
  EXPECT_EQ(Say("wait; echo done").out, "done\n");
}

TEST_F(Session, Stdin_FixedOpenAndNone) {
  EXPECT_EQ(Say("cat; echo done").out, "done\n");
  v1::ExecRequest fixed = In("s", "cat");
  fixed.set_stdin("abc");
  EXPECT_EQ(Run(fixed).out, "abc");
  v1::ExecRequest open = In("s", "wc -c");
  open.set_stdin_open(true);
  auto started = box_->Start(open);
  ASSERT_TRUE(started.ok());
  v1::StdinRequest write;
  write.set_op_id(open.op_id());
  for (uint64_t offset = 0; offset < 3'000'000;) {
    write.set_offset(offset);
    write.set_data(std::string(std::min<uint64_t>(500000, 3'000'000 - offset), 'x'));
    offset = Call<v1::StdinReply>("WriteStdin", write).accepted();
  }
  write.set_offset(3'000'000);
  write.clear_data();
  write.set_eof(true);
  Call<v1::StdinReply>("WriteStdin", write);
  auto outcome = box_->Collect(*started);
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->out, "3000000\n");
  // The end of input may come before the shell has looked.
  v1::ExecRequest quick = In("s", "cat");
  quick.set_stdin_open(true);
  quick.set_stdin("early");
  started = box_->Start(quick);
  write.set_op_id(quick.op_id());
  write.set_offset(5);
  Call<v1::StdinReply>("WriteStdin", write);
  EXPECT_EQ(box_->Collect(*started)->out, "early");
}

TEST_F(Session, Argv_ArrivesAsGiven) {
  v1::ExecRequest request = box_->Argv({"printf", "%s|", "a b", "it's", "$HOME", "*", ""});
  request.set_session("s");
  EXPECT_EQ(Run(request).out, "a b|it's|$HOME|*||");
}

TEST_F(Session, Merged_KeepsTheOrder) {
  v1::ExecRequest request = In("s", "for i in 1 2 3; do echo $i; echo e$i >&2; done");
  request.set_merged(true);
  Outcome outcome = Run(request);
  EXPECT_EQ(outcome.out, "1\ne1\n2\ne2\n3\ne3\n");
  EXPECT_EQ(outcome.err, "");
}

TEST_F(Session, Commands_WaitForTheirTurnOutsideTheirTimeLimit) {
  std::vector<uint32_t> calls;
  for (int i = 0; i < 5; ++i) {
    v1::ExecRequest request =
        In("s", fmt::format("sleep 0.2; echo {} >> /tmp/turns; cat /tmp/turns", i));
    request.set_timeout_ms(600);
    calls.push_back(*box_->client().Send("Exec", request));
  }
  std::string expected;
  for (int i = 0; i < 5; ++i) {
    expected += fmt::format("{}\n", i);
    auto reply = box_->client().Receive<v1::ExecReply>(calls[static_cast<size_t>(i)]);
    ASSERT_TRUE(reply.ok());
    auto outcome = box_->Collect(*reply);
    EXPECT_TRUE(outcome->Exited(0)) << outcome->result.ShortDebugString();
    EXPECT_EQ(outcome->out, expected);
  }
}

TEST_F(Session, Close_KillsTheTreeAndEndsWhatRuns) {
  Say("(trap '' TERM HUP; setsid sh -c 'while :; do echo x >> /tmp/alive; sleep 0.05; done') & "
      "true");
  auto running = box_->Start(In("s", "sleep 100"));
  auto queued = box_->Start(In("s", "echo never"));
  ASSERT_TRUE(running.ok() && queued.ok());
  Close();
  for (const auto* reply : {&*running, &*queued}) {
    auto outcome = box_->Collect(*reply);
    EXPECT_EQ(outcome->result.kind(), v1::END_KILLED);
    EXPECT_EQ(outcome->result.killed_by(), "session_closed");
    EXPECT_EQ(outcome->out, "");
  }
  EXPECT_EQ(
      Run("a=$(wc -c < /tmp/alive); sleep 0.3; test $a = $(wc -c < /tmp/alive) && echo dead").out,
      "dead\n");
  EXPECT_TRUE(CgroupsGone());
  EXPECT_EQ(Say("echo new").out, "new\n");
  v1::SessionRequest unknown;
  unknown.set_name("unknown");
  EXPECT_EQ(Failure("CloseSession", unknown).reason(), "session.not_found");
}

TEST_F(Session, Settings_AreThoseOfTheFirstCommand) {
  Run("echo 'alice:x:1234:1235::/tmp:/bin/sh' >> /etc/passwd");
  v1::ExecRequest first = In("u", "id -u; pwd; echo $V");
  first.set_user("alice");
  first.set_cwd("/tmp");
  v1::KeyValue& pair = *first.add_env();
  pair.set_key("V");
  pair.set_value("value");
  EXPECT_EQ(Run(first).out, "1234\n/tmp\nvalue\n");
  EXPECT_EQ(Run(In("u", "id -u; cd /; pwd")).out, "1234\n/\n");
  v1::ExecRequest other = In("u", "true");
  other.set_user("root");
  Error error = Failure("Exec", other);
  EXPECT_EQ(error.reason(), "session.settings_differ");
  EXPECT_EQ(error.field(), "user");
}

TEST_F(Session, PosixShell_WorksWithItsLimits) {
  shell_ = "/bin/dash";
  EXPECT_TRUE(Say("cd /tmp; A=1; f() { echo f; }; exec 3>&- 4>&- 9>&-").Exited(0));
  EXPECT_EQ(Say("pwd; echo $A; f").out, "/tmp\n1\nf\n");
  EXPECT_TRUE(Say("(exit 5)").Exited(5));
  EXPECT_EQ(Say("echo $?").out, "5\n");
  EXPECT_TRUE(Say("readonly R=1; R=2").Exited(2));
  EXPECT_EQ(Say("echo $A").out, "1\n");
  EXPECT_EQ(Say("echo to-err >&2").err, "to-err\n");
  Outcome timed = Say("sleep 100", 300);
  EXPECT_EQ(timed.result.kind(), v1::END_TIMEOUT);
  EXPECT_THAT(timed.result.message(), HasSubstr("only bash can be interrupted"));
  EXPECT_EQ(Say("echo next$A").out, "next\n");
}

TEST_F(Session, UnusableShell_IsASpawnError) {
  shell_ = "/bin/cat";
  Outcome outcome = Say("true");
  EXPECT_EQ(outcome.result.kind(), v1::END_SPAWN_ERROR);
  EXPECT_EQ(outcome.result.spawn_step(), "session");
  shell_ = "/no/such/shell";
  outcome = Say("true");
  EXPECT_EQ(outcome.result.kind(), v1::END_SPAWN_ERROR);
  EXPECT_EQ(outcome.result.spawn_step(), "exec");
  EXPECT_EQ(outcome.result.sys_errno(), ENOENT);
}

TEST_F(Session, CpuTime_IsThatOfTheCommand) {
  Outcome busy = Say("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done");
  Outcome idle = Say("true");
  EXPECT_GT(busy.result.user_usec() + busy.result.system_usec(), 50000u);
  EXPECT_LT(idle.result.user_usec() + idle.result.system_usec(), 30000u);
}

}  // namespace
}  // namespace dsec::aether
