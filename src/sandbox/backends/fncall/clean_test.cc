// SPDX-License-Identifier: Apache-2.0
// Nothing of one call is there for the next, and nothing above a call is in its reach; acceptance
// cases 140 and 142 for one worker.
#include <gmock/gmock.h>

#include "sandbox/testing/fncall_fixture.h"

namespace dsec::sandbox {
namespace {

class FnClean : public testing::FnCallTest {};

TEST_F(FnClean, Look_FindsNothingInAFirstCall) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const FnReport report = Must(*worker, Program({"call-guest", "look"}));
  EXPECT_EQ(report.step.verdict(), v1::FN_OK);
  EXPECT_EQ(report.step.stdout().data(), "");
}

TEST_F(FnClean, Plant_IsGoneForTheNextCall) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  for (int round = 0; round < 3; ++round) {
    const FnReport planted = Must(*worker, Program({"call-guest", "plant"}));
    EXPECT_EQ(planted.step.verdict(), v1::FN_OK) << planted.step.stderr().data();
    EXPECT_FALSE(planted.dirty) << planted.dirt;
    const FnReport report = Must(*worker, Program({"call-guest", "look"}));
    EXPECT_EQ(report.step.verdict(), v1::FN_OK);
    EXPECT_EQ(report.step.stdout().data(), "");
  }
}

TEST_F(FnClean, Attack_ReachesNothingAbove) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  const FnReport report = Must(*worker, Program({"call-guest", "attack"}));
  EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.signal();
  EXPECT_EQ(report.step.stdout().data(), "");
  EXPECT_EQ(Must(*worker, Program({"true"})).step.verdict(), v1::FN_OK);
}

TEST_F(FnClean, Program_HasThreeDescriptorsAndItsOwnFolder) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  EXPECT_EQ(Must(*worker, Program({"call-guest", "fds"})).step.stdout().data(), "0\n1\n2\n");
  const FnReport report =
      Must(*worker, Shell("pwd; id -u; ls -A; stat -c '%u %a' .; cat /proc/1/environ; true"));
  EXPECT_EQ(report.step.stdout().data(), "/work\n1000\n1000 755\n");
}

TEST_F(FnClean, Files_OfTheCallAndWhatItMade) {
  const auto worker = MakeWorker();
  ASSERT_NE(worker, nullptr);
  v1::FnFile data;
  data.set_path("in/deep/data");
  data.set_content("data");
  data.set_mode(0755);
  FnRun run = Shell(
      "cat main.c in/deep/data; stat -c %a in/deep/data; mkdir out; echo 1 > out/a; echo 2 > b; "
      "ln -s /etc/passwd link; mkfifo fifo 2>/dev/null || true; ln -s / out/root; chmod 600 b; "
      "echo changed > in/deep/data");
  run.code_path = "main.c";
  run.code = "code ";
  run.files = {&data};
  run.fetch = {"*"};
  FnReport report = Must(*worker, run);
  EXPECT_EQ(report.step.stdout().data(), "code data755\n");
  std::map<std::string, std::string> files;
  for (const FnFetched& file : report.files) files[file.path] = file.content;
  EXPECT_THAT(files, ::testing::UnorderedElementsAre(::testing::Pair("b", "2\n"),
                                                     ::testing::Pair("out/a", "1\n"),
                                                     ::testing::Pair("in/deep/data", "changed\n")));
  run.fetch = {"b", "nothing", "link", "out/", "fifo", "out/root/proc/version", "../etc/passwd"};
  report = Must(*worker, run);
  files.clear();
  for (const FnFetched& file : report.files) files[file.path] = file.content;
  EXPECT_EQ(files["b"], "2\n");
  EXPECT_EQ(files["out/a"], "1\n");
  EXPECT_FALSE(files.contains("link")) << "a link may be to what the code cannot read";
  EXPECT_THAT(report.missing,
              ::testing::UnorderedElementsAre("nothing", "link", "fifo", "out/root/proc/version"));
  run.fetch = {"b", "out/a"};
  run.fetch_bytes = 2;
  report = Must(*worker, run);
  EXPECT_EQ(report.files.size(), 1u);
  EXPECT_THAT(report.missing, ::testing::ElementsAre("out/a"));
}

}  // namespace
}  // namespace dsec::sandbox
