// SPDX-License-Identifier: Apache-2.0
#include <archive.h>
#include <archive_entry.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/connection.h"
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

TEST(FindEndpoint, NotAnAddress_IsRefused) {
  EXPECT_EQ(FindEndpoint("ftp://x", "k").error().reason(), "client.url");
  EXPECT_EQ(FindEndpoint("http://h:1/", "k")->url, "http://h:1");
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
    return UnpackTree(file->get(), root->get());
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
