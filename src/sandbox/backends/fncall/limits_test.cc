// SPDX-License-Identifier: Apache-2.0
// Limits and verdicts of calls on the real kernel; acceptance cases 131, 133, 134, 135, 137, 141.
#include <gmock/gmock.h>
#include <signal.h>

#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox {
namespace {

class FnLimits : public testing::FnCallTest {
 protected:
  void SetUp() override {
    FnCallTest::SetUp();
    if (fncall_ == nullptr) return;
    worker_ = FnCallTest::MakeWorker();
    ASSERT_NE(worker_, nullptr);
  }
  void TearDown() override {
    worker_.reset();
    FnCallTest::TearDown();
  }
  FnRun Guest(std::vector<std::string> args, uint64_t cpu_ms = 20'000) {
    args.insert(args.begin(), "call-guest");
    FnRun run = Program(std::move(args));
    run.limits.set_cpu_ms(cpu_ms);
    run.limits.set_wall_ms(30'000);
    run.limits.set_memory_bytes(64 << 20);
    return run;
  }
  FnReport Expect(FnRun run, v1::FnVerdict verdict, const std::string& limit) {
    FnReport report = Must(*worker_, std::move(run));
    EXPECT_EQ(report.step.verdict(), verdict) << v1::FnVerdict_Name(report.step.verdict());
    EXPECT_EQ(report.step.limit(), limit);
    EXPECT_FALSE(report.dirty) << report.dirt;
    return report;
  }
  void ExpectUsable() { Expect(Program({"true"}), v1::FN_OK, ""); }

  std::unique_ptr<FnWorker> worker_;
};

TEST_F(FnLimits, CpuTime_IsThatOfTheTree) {
  for (const auto& args : std::vector<std::vector<std::string>>{
           {"burn", "1"}, {"burn", "4"}, {"burn-child"}, {"burn-deaf"}}) {
    const FnReport report = Expect(Guest(args, 500), v1::FN_TIME_LIMIT, "cpu");
    EXPECT_GE(report.step.cpu_usec(), 500'000u);
    EXPECT_LE(report.step.cpu_usec(), 1'000'000u) << args[0];
  }
  ExpectUsable();
}

TEST_F(FnLimits, WallTime_EndsWhatDoesNothing) {
  FnRun sleeping = Program({"sleep", "60"});
  sleeping.limits.set_wall_ms(300);
  const FnReport report = Expect(std::move(sleeping), v1::FN_TIME_LIMIT, "wall");
  EXPECT_GE(report.step.wall_usec(), 300'000u);
  EXPECT_EQ(report.step.signal(), SIGKILL);
  // Reads for ever from a pipe that a helper of its own holds open.
  FnRun reading = Shell("sleep 60 | cat");
  reading.limits.set_wall_ms(300);
  Expect(std::move(reading), v1::FN_TIME_LIMIT, "wall");
  ExpectUsable();
}

TEST_F(FnLimits, CpuTime_OfEarlierCallsIsNotCharged) {
  FnRun run = Guest({"burn-for", "400"}, 500);
  Expect(run, v1::FN_OK, "");
  const FnReport again = Expect(run, v1::FN_OK, "");
  EXPECT_LT(again.step.cpu_usec(), 500'000u);
}

TEST_F(FnLimits, Limits_AreThoseOfTheCallWhateverCameBefore) {
  FnRun big = Guest({"touch", "40"});
  big.limits.set_memory_bytes(16 << 20);
  Expect(big, v1::FN_MEMORY_LIMIT, "memory");  // also of the very first call
  big.limits.set_memory_bytes(128 << 20);
  Expect(big, v1::FN_OK, "");
  big.limits.set_memory_bytes(16 << 20);
  Expect(big, v1::FN_MEMORY_LIMIT, "memory");
  big.limits.set_memory_bytes(64 << 20);
  Expect(big, v1::FN_OK, "");
}

TEST_F(FnLimits, Memory_OfOneAndOfMany) {
  const FnReport one = Expect(Guest({"touch", "10240"}), v1::FN_MEMORY_LIMIT, "memory");
  EXPECT_GT(one.step.memory_peak_bytes(), 60u << 20);
  EXPECT_LE(one.step.memory_peak_bytes(), 66u << 20);
  Expect(Guest({"touch-children", "20", "8"}), v1::FN_MEMORY_LIMIT, "memory");
  Expect(Guest({"touch-child-ignored", "1000"}), v1::FN_MEMORY_LIMIT, "memory");
  Expect(Guest({"recurse"}), v1::FN_MEMORY_LIMIT, "memory");
  ExpectUsable();
}

TEST_F(FnLimits, Memory_OfFilesCountsAndASmallHogIsFound) {
  const FnReport report = Must(*worker_, Guest({"small-hog"}));
  EXPECT_EQ(report.step.verdict(), v1::FN_MEMORY_LIMIT);
  if (!report.dirty) return ExpectUsable();
  // Where the runner cannot be put out of reach the kernel may have chosen the init of the cell.
  EXPECT_EQ(Run(*worker_, Program({"true"})).ok(), false);
}

TEST_F(FnLimits, Memory_TheLeastThatMayBeAskedForIsEnough) {
  Must(*worker_, Shell("cat /bin/* > /dev/null"));
  for (int i = 0; i < 3; ++i) {
    FnRun run = Guest({"touch", "7"});
    run.limits.set_memory_bytes(8 << 20);
    Expect(run, v1::FN_OK, "");
    run.argv = {"call-guest", "touch", "64"};
    Expect(run, v1::FN_MEMORY_LIMIT, "memory");
  }
}

TEST_F(FnLimits, Memory_ThatIsOnlyMappedIsFree) {
  const FnReport report = Expect(Guest({"map", "10"}), v1::FN_OK, "");
  EXPECT_LT(report.step.memory_peak_bytes(), 4u << 20);
}

TEST_F(FnLimits, MemoryPeak_IsThatOfTheCallAlone) {
  // Page cache of the layer, which stays charged to the worker.
  Must(*worker_, Shell("cat /bin/* /lib/*/* > /dev/null"));
  const FnReport report = Expect(Guest({"touch", "20"}), v1::FN_OK, "");
  EXPECT_GT(report.step.memory_peak_bytes(), 19u << 20);
  EXPECT_LT(report.step.memory_peak_bytes(), 25u << 20);
  EXPECT_LT(Expect(Program({"call-guest"}), v1::FN_OK, "").step.memory_peak_bytes(), 4u << 20);
}

TEST_F(FnLimits, Memory_OfAnEarlierCallIsBackBeforeTheNext) {
  FnRun files = Shell("head -c 50000000 /dev/zero > f");
  files.limits.set_memory_bytes(64 << 20);
  FnRun segment = Guest({"segment", "50"});
  for (int i = 0; i < 4; ++i) {
    Expect(files, v1::FN_OK, "");
    Expect(segment, v1::FN_OK, "");
    Expect(Guest({"touch", "50"}), v1::FN_OK, "");
  }
}

TEST_F(FnLimits, Processes_AreCountedExactly) {
  FnRun run = Guest({"children", "9"});
  run.limits.set_processes(10);
  Expect(run, v1::FN_OK, "");
  run.argv = {"call-guest", "children", "10"};
  const FnReport report = Expect(run, v1::FN_PROCESS_LIMIT, "processes");
  EXPECT_EQ(report.step.stdout().data(), "9\n");
  EXPECT_EQ(report.step.exit_code(), 9);
  run = Shell(":(){ :|:& };:");
  run.limits.set_processes(20);
  run.limits.set_wall_ms(1000);
  Must(*worker_, run);
  ExpectUsable();
}

TEST_F(FnLimits, Output_IsCappedAndEndsTheProgram) {
  FnRun run = Guest({"write-forever"});
  run.limits.set_output_bytes(1000);
  const FnReport report = Expect(run, v1::FN_OUTPUT_LIMIT, "output");
  EXPECT_EQ(report.step.stdout().data(), std::string(1000, 'x'));
  EXPECT_GT(report.step.stdout().total(), 1000u);
  run = Guest({"write", "1000"});
  run.limits.set_output_bytes(1000);
  EXPECT_EQ(Expect(run, v1::FN_OK, "").step.stdout().data().size(), 1000u);
  run = Guest({"write", "67108864"});
  run.limits.set_output_bytes(64 << 20);
  EXPECT_EQ(Expect(run, v1::FN_OK, "").step.stdout().total(), 64u << 20);
}

TEST_F(FnLimits, Output_OddBytesArriveAsTheyAre) {
  for (const auto& [script, bytes] : std::vector<std::pair<std::string, std::string>>{
           {"true", ""},
           {"echo", "\n"},
           {"printf x", "x"},
           {"printf 'a\\r\\n'", "a\r\n"},
           {"printf '\\000\\377\\376'", std::string("\0\xff\xfe", 3)},
           {"exec >&-; exit 0", ""}}) {
    const FnReport report = Expect(Shell(script), v1::FN_OK, "");
    EXPECT_EQ(report.step.stdout().data(), bytes) << script;
    EXPECT_TRUE(report.step.has_stdout());
  }
}

TEST_F(FnLimits, Stdin_NeverBlocks) {
  const std::string large(64 << 20, 'y');
  FnRun unread = Program({"true"});
  unread.stdin_bytes = large;
  Expect(unread, v1::FN_OK, "");
  FnRun counted = Program({"wc", "-c"});
  counted.stdin_bytes = large;
  counted.limits.set_wall_ms(20'000);
  EXPECT_EQ(Expect(counted, v1::FN_OK, "").step.stdout().data(), "67108864\n");
  FnRun echoed = Program({"cat"});
  echoed.stdin_bytes = large;
  echoed.limits.set_output_bytes(1000);
  Expect(echoed, v1::FN_OUTPUT_LIMIT, "output");
}

TEST_F(FnLimits, Files_OfOneSizeAndOfTheDisk) {
  FnRun run = Shell("exec head -c 2000000 /dev/zero > f");
  run.limits.set_file_bytes(1'000'000);
  const FnReport large = Expect(run, v1::FN_SIGNALED, "file");
  EXPECT_EQ(large.step.signal(), SIGXFSZ);
  run = Shell("head -c 20000000 /dev/zero > f");
  run.limits.set_disk_bytes(4 << 20);
  Expect(run, v1::FN_WRONG_EXIT, "disk");
  run = Shell(
      "for i in $(getconf PATH) 1 2 3; do :; done; i=0; while echo > /tmp/f$i; do i=$((i+1)); "
      "done; "
      "exit 7");
  run.limits.set_disk_inodes(100);
  Expect(run, v1::FN_WRONG_EXIT, "disk");
  run = Shell("head -c 50000000 /dev/zero > f");
  Expect(run, v1::FN_OK, "");
}

TEST_F(FnLimits, Files_OfTheCallThatDoNotFitAreItsOwnFault) {
  const std::string large(4 << 20, 'z');
  FnRun run = Program({"true"});
  run.code_path = "main.c";
  run.code = large;
  run.limits.set_disk_bytes(1 << 20);
  const FnReport report = Expect(run, v1::FN_WRONG_EXIT, "disk");
  EXPECT_THAT(report.step.stderr().data(), ::testing::HasSubstr("main.c"));
  ExpectUsable();
}

TEST_F(FnLimits, MainsExit_EndsTheCallAndItsHelpers) {
  FnRun run = Guest({"late", "/work/result"});
  run.code_path = "result";
  run.code = "first";
  run.fetch = {"result"};
  const FnReport report = Expect(run, v1::FN_OK, "");
  ASSERT_EQ(report.files.size(), 1u);
  EXPECT_EQ(report.files[0].content, "first");
  EXPECT_EQ(report.step.stdout().data(), "");
  EXPECT_GT(report.step.cpu_usec(), 150'000u) << "time of the helper";
}

TEST_F(FnLimits, Signals_AreThoseOfTheProgram) {
  for (const int signal : {SIGABRT, SIGTERM, SIGSEGV, SIGKILL, SIGPIPE, SIGINT}) {
    const FnReport report = Expect(Guest({"raise", std::to_string(signal)}), v1::FN_SIGNALED, "");
    EXPECT_EQ(report.step.signal(), signal);
  }
  Expect(Shell("kill -TERM $$; sleep 1"), v1::FN_SIGNALED, "");
}

TEST_F(FnLimits, EndlessDevices_AreBoundedLikeAllElse) {
  FnRun run = Shell("cat /dev/zero | tail > /work/all");
  run.limits.set_memory_bytes(64 << 20);
  Expect(run, v1::FN_MEMORY_LIMIT, "memory");
  run = Shell("cat /dev/urandom");
  Expect(run, v1::FN_OUTPUT_LIMIT, "output");
  ExpectUsable();
}

TEST_F(FnLimits, MissingProgram_IsNamedAndTheWorkerLivesOn) {
  const auto report = Run(*worker_, Program({"no-such-program"}));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.exec_failed");
  EXPECT_EQ(report.error().sys_errno(), ENOENT);
  ExpectUsable();
}

}  // namespace
}  // namespace dsec::sandbox
