// SPDX-License-Identifier: Apache-2.0
#include "cli/cli.h"

#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/connection.h"
#include "cli/exec_session.h"
#include "cli/output.h"
#include "cli/tree_writer.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

TEST(ParseSize, KnownUnits_GiveBytes) {
  EXPECT_EQ(*ParseSize("4096", "--x"), 4096u);
  EXPECT_EQ(*ParseSize("128m", "--x"), 128u << 20);
  EXPECT_EQ(*ParseSize("1.5g", "--x"), 3u << 29);
  EXPECT_EQ(*ParseSize("2KiB", "--x"), 2048u);
}

TEST(ParseSize, Malformed_NamesTheFlag) {
  for (const char* text : {"", "m", "-1", "1q", "1 m", "nan", "inf", "1e30", "0x10"}) {
    auto parsed = ParseSize(text, "--memory");
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_NE(parsed.error().message().find("--memory"), std::string::npos);
  }
}

TEST(ParseMillis, KnownUnits_GiveMilliseconds) {
  EXPECT_EQ(*ParseMillis("90", "--x"), 90000u);
  EXPECT_EQ(*ParseMillis("500ms", "--x"), 500u);
  EXPECT_EQ(*ParseMillis("1.5m", "--x"), 90000u);
  EXPECT_EQ(*ParseMillis("2h", "--x"), 7200000u);
}

TEST(Table, ControlCharacters_AreNotPrinted) {
  EXPECT_EQ(Table({"A", "B"}, {{"x\x1b[31m", "y"}, {"longer", "z"}}),
            "A       B\nx?[31m  y\nlonger  z\n");
}

TEST(ExitCode, EachEnd_HasItsOwn) {
  EXPECT_EQ(ExitCode({{"kind", "exited"}, {"exit_code", 7}}), 7);
  EXPECT_EQ(ExitCode({{"kind", "signaled"}, {"signal", 9}}), 137);
  EXPECT_EQ(ExitCode({{"kind", "timeout"}}), 124);
  EXPECT_EQ(ExitCode({{"kind", "spawn_error"}, {"step", "exec"}, {"errno_name", "ENOENT"}}), 127);
  EXPECT_EQ(ExitCode({{"kind", "spawn_error"}, {"step", "exec"}, {"errno_name", "EACCES"}}), 126);
  EXPECT_EQ(ExitCode({{"kind", "spawn_error"}, {"step", "cwd"}, {"errno_name", "ENOENT"}}), 126);
  EXPECT_EQ(ExitCode({{"kind", "sandbox_ended"}}), 125);
}

TEST(FnExitCode, EachVerdict_HasItsOwn) {
  const auto of = [](const char* verdict, json step) {
    return FnExitCode({{"verdict", verdict}, {"run", std::move(step)}});
  };
  EXPECT_EQ(of("OK", {{"exit_code", 0}}), 0);
  EXPECT_EQ(of("WRONG_EXIT", {{"exit_code", 7}}), 7);
  EXPECT_EQ(of("SIGNALED", {{"signal", 11}}), 139);
  EXPECT_EQ(of("TIME_LIMIT", {{"limit", "cpu"}}), 124);
  EXPECT_EQ(of("MEMORY_LIMIT", {{"limit", "memory"}}), 137);
  EXPECT_EQ(FnExitCode({{"verdict", "COMPILE_ERROR"}}), 126);
  EXPECT_EQ(FnExitCode({{"verdict", "INFRASTRUCTURE"}}), 125);
  EXPECT_EQ(FnExitCode(json::object()), 125);
  EXPECT_EQ(FnExplain({{"verdict", "TIME_LIMIT"},
                       {"run", {{"limit", "cpu"}, {"wall_usec", 2500}, {"cpu_usec", 1000}}}}),
            "TIME_LIMIT (cpu), 2.5 ms, cpu 1.0 ms, 0 B");
}

TEST(FindEndpoint, NotAnAddress_IsRefused) {
  EXPECT_EQ(FindEndpoint("ftp://x", "k").error().reason(), "client.url");
  EXPECT_EQ(FindEndpoint("http://h:1/", "k")->url, "http://h:1");
}

// What CliMain makes of a command line, without any platform.
int RunCli(std::vector<std::string> words, std::string* out = nullptr) {
  words.insert(words.begin(), "dsec");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int code = CliMain(static_cast<int>(argv.size()), argv.data(), {});
  const std::string text =
      testing::internal::GetCapturedStdout() + testing::internal::GetCapturedStderr();
  if (out != nullptr) *out = text;
  return code;
}

TEST(CommandLine, BadWords_FailAndAreNamed) {
  std::string out;
  EXPECT_EQ(RunCli({"ps", "--no-such-flag"}, &out), 125);
  EXPECT_NE(out.find("no-such-flag"), std::string::npos);
  EXPECT_EQ(RunCli({"frobnicate"}), 125);
  EXPECT_EQ(RunCli({}), 125);
  EXPECT_EQ(RunCli({"create", "x", "--memory", "lots", "--api-key", "k"}, &out), 125);
  EXPECT_NE(out.find("--memory"), std::string::npos);
  EXPECT_EQ(RunCli({"exec", "sb-x", "--api-key", "k"}, &out), 125);
  EXPECT_EQ(RunCli({"layer", "build", "--kind", "base"}, &out), 125);
  EXPECT_NE(out.find("--from-dir"), std::string::npos);
  EXPECT_EQ(RunCli({"layer", "build", "--kind", "cake", "--from-dir", "/"}, &out), 125);
  EXPECT_NE(out.find("cake"), std::string::npos);
  EXPECT_EQ(RunCli({"fn", "run", "/dev/null", "--api-key", "k"}, &out), 125);
  EXPECT_NE(out.find("--type"), std::string::npos);
  EXPECT_EQ(
      RunCli({"fn", "run", "/dev/null", "--type", "c", "-l", "ram=1g", "--api-key", "k"}, &out),
      125);
  EXPECT_NE(out.find("--limit: ram=1g"), std::string::npos);
  EXPECT_EQ(RunCli({"fn", "run", "/nonexistent.c", "--api-key", "k"}, &out), 125);
  EXPECT_NE(out.find("cli.file"), std::string::npos);
  EXPECT_EQ(RunCli({"cp", "a", "b", "--api-key", "k"}, &out), 125);
  EXPECT_NE(out.find("SANDBOX:PATH"), std::string::npos);
}

TEST(CommandLine, NoPlatform_SaysWhatToDo) {
  std::string out;
  EXPECT_EQ(RunCli({"ps", "--url", "unix:/nonexistent/socket", "--api-key", "k"}, &out), 125);
  EXPECT_NE(out.find("client.unreachable"), std::string::npos);
  EXPECT_NE(out.find("dsec up"), std::string::npos);
  EXPECT_EQ(RunCli({"version"}, &out), 0);
}

TEST(Printer, Records_BecomeOutputOffsetsAndExitCode) {
  Printer printer(false);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  EXPECT_TRUE(printer.OnLine(R"({"type":"started","op_id":"o","pid":7})"));
  EXPECT_TRUE(printer.OnLine(R"({"type":"stdout","offset":0,"data_b64":"aGVsbG8="})"));
  EXPECT_TRUE(printer.OnLine(R"({"type":"stderr","offset":10,"data_b64":"eA==","skipped":10})"));
  EXPECT_TRUE(printer.OnLine("no json"));
  EXPECT_FALSE(printer.ended());
  EXPECT_TRUE(printer.OnLine(R"({"type":"exit","result":{"kind":"exited","exit_code":3}})"));
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "hello");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("10 bytes of stderr were dropped"),
            std::string::npos);
  EXPECT_TRUE(printer.started() && printer.ended());
  EXPECT_EQ(printer.stdout_offset(), 5u);
  EXPECT_EQ(printer.stderr_offset(), 11u);
  EXPECT_EQ(printer.Finish(), 3);
}

struct Entry {
  const char* name;
  unsigned type;
  std::string value;  // content, link target, or hard link target with type 0
  mode_t mode = 0644;
};

class UnpackTreeTest : public testing::Test {
 protected:
  UnpackTreeTest() : folder_(std::move(os::TempDir::Create("dsec-cli-")).value()) {
    target_ = folder_.path() + "/target";
    mkdir(target_.c_str(), 0755);
    canary_ = folder_.path() + "/canary";
    EXPECT_TRUE(os::CreateFile(AT_FDCWD, canary_.c_str(), "alive", 0644).ok());
  }
  ~UnpackTreeTest() override { EXPECT_EQ(*os::ReadFile(AT_FDCWD, canary_.c_str(), 100), "alive"); }

  Result<std::vector<std::string>> Unpack(const std::vector<Entry>& entries) {
    const std::string tar = folder_.path() + "/tar";
    auto file = os::OpenAt(AT_FDCWD, tar.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
    archive* out = archive_write_new();
    archive_write_set_format_pax_restricted(out);
    archive_write_open_fd(out, file->get());
    for (const Entry& given : entries) {
      archive_entry* entry = archive_entry_new();
      archive_entry_set_pathname(entry, given.name);
      archive_entry_set_perm(entry, given.mode);
      archive_entry_set_filetype(entry, given.type == 0 ? AE_IFREG : given.type);
      if (given.type == AE_IFLNK) archive_entry_set_symlink(entry, given.value.c_str());
      if (given.type == 0) archive_entry_set_hardlink(entry, given.value.c_str());
      if (given.type == AE_IFREG)
        archive_entry_set_size(entry, static_cast<la_int64_t>(given.value.size()));
      archive_write_header(out, entry);
      if (given.type == AE_IFREG) archive_write_data(out, given.value.data(), given.value.size());
      archive_entry_free(entry);
    }
    archive_write_close(out);
    archive_write_free(out);
    lseek(file->get(), 0, SEEK_SET);
    auto root = os::OpenAt(AT_FDCWD, target_.c_str(), O_RDONLY | O_DIRECTORY);
    return UnpackTree(std::move(*file), root->get());
  }

  os::TempDir folder_;
  std::string target_;
  std::string canary_;
};

// case 42: a hostile tree on download.
TEST_F(UnpackTreeTest, Case042_NamesThatLeadOutside_AreRefused) {
  const std::vector<std::vector<Entry>> attacks = {
      {{"../canary", AE_IFREG, "x"}},
      {{"/tmp/dsec-cli-outside", AE_IFREG, "x"}},
      {{"a/../../canary", AE_IFREG, "x"}},
      {{"h", 0, "../canary"}},
      {{"l", AE_IFLNK, ".."}, {"l/canary", AE_IFREG, "x"}},
  };
  for (const auto& entries : attacks) {
    auto done = Unpack(entries);
    ASSERT_FALSE(done.ok()) << entries[0].name;
    EXPECT_EQ(done.error().reason(), "archive.hostile");
  }
}

TEST_F(UnpackTreeTest, Names_AreBytes) {
  // A name that no character set knows, one that needs a pax header, one that could be normalised.
  const std::string odd = "bad\xff\xfe";
  const std::string decomposed = "cafe\xcc\x81";
  const std::string longest(200, 'n');
  ASSERT_TRUE(Unpack({{odd.c_str(), AE_IFREG, "1"},
                      {decomposed.c_str(), AE_IFREG, "2"},
                      {("caf\xc3\xa9" + longest).c_str(), AE_IFREG, "3"},
                      {"sub\xc3\xa9/link", AE_IFLNK, "\xc3\xa9\xff"}})
                  .ok());
  const auto content = [&](const std::string& name) {
    return *os::ReadFile(AT_FDCWD, (target_ + "/" + name).c_str(), 100);
  };
  EXPECT_EQ(content(odd), "1");
  EXPECT_EQ(content(decomposed), "2");
  EXPECT_EQ(content("caf\xc3\xa9" + longest), "3");
}

TEST_F(UnpackTreeTest, Case042_LinkThatIsThereAlready_IsNotFollowed) {
  ASSERT_EQ(symlink("..", (target_ + "/l").c_str()), 0);
  EXPECT_FALSE(Unpack({{"l/canary", AE_IFREG, "x"}}).ok());
  ASSERT_EQ(symlink(canary_.c_str(), (target_ + "/f").c_str()), 0);
  EXPECT_TRUE(Unpack({{"f", AE_IFREG, "new"}}).ok());
}

TEST_F(UnpackTreeTest, Case042_DevicesAreLeftOutAndSetuidDropped) {
  auto left_out =
      Unpack({{"fifo", AE_IFIFO, ""}, {"su", AE_IFREG, "x", 04755}, {"d", AE_IFDIR, "", 0755}});
  ASSERT_TRUE(left_out.ok());
  EXPECT_EQ(left_out->size(), 1u);
  struct stat info{};
  ASSERT_EQ(stat((target_ + "/su").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0755u);
}

}  // namespace
}  // namespace dsec::cli
