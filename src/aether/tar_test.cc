// SPDX-License-Identifier: Apache-2.0
#include "aether/tar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <optional>
#include <string>

namespace dsec::aether {
namespace {

using ::testing::HasSubstr;

struct Member {
  TarEntry entry;
  std::string data;  // with holes as zeros
};

struct Recorder : TarReader::Sink {
  std::vector<Member> members;
  Result<void> OnEntry(const TarEntry& entry) override {
    members.push_back({entry, std::string(std::min<uint64_t>(entry.size, 1 << 20), '\0')});
    return Ok();
  }
  Result<void> OnData(uint64_t offset, std::string_view data) override {
    members.back().data.replace(static_cast<size_t>(offset), data.size(), data);
    return Ok();
  }
  Result<void> OnEntryEnd() override { return Ok(); }
};

Result<std::vector<Member>> Parse(std::string_view archive, size_t step = 1 << 20) {
  Recorder recorder;
  TarReader reader(recorder);
  for (size_t i = 0; i < archive.size(); i += step)
    DSEC_TRY_VOID(reader.Feed(archive.substr(i, step)));
  DSEC_TRY_VOID(reader.Finish());
  return std::move(recorder.members);
}

std::string File(const std::string& path, const std::string& data) {
  TarEntry entry;
  entry.path = path;
  entry.size = data.size();
  return TarHeader(entry) + data + std::string(TarPadding(data.size()), '\0');
}

TEST(Tar, EveryType_ComesBack) {
  std::string archive;
  TarEntry directory{.type = TarEntry::Type::kDirectory, .path = "d/", .mode = 01755};
  archive += TarHeader(directory);
  TarEntry link{.type = TarEntry::Type::kSymlink, .path = "d/l", .link = std::string(200, 'x')};
  archive += TarHeader(link);
  archive += File("d/f", "hello");
  TarEntry hard{.type = TarEntry::Type::kHardlink, .path = "d/h", .link = "d/f"};
  archive += TarHeader(hard);
  TarEntry fifo{.type = TarEntry::Type::kFifo, .path = "d/p"};
  archive += TarHeader(fifo);
  archive += TarEnd();
  for (size_t step : {1u, 511u, 512u, 100000u}) {
    auto members = Parse(archive, step);
    ASSERT_TRUE(members.ok()) << members.error().ToString();
    ASSERT_EQ(members->size(), 5u);
    EXPECT_EQ((*members)[0].entry.type, TarEntry::Type::kDirectory);
    EXPECT_EQ((*members)[0].entry.mode, 01755u);
    EXPECT_EQ((*members)[1].entry.link, std::string(200, 'x'));
    EXPECT_EQ((*members)[2].data, "hello");
    EXPECT_EQ((*members)[3].entry.link, "d/f");
    EXPECT_EQ((*members)[4].entry.type, TarEntry::Type::kFifo);
  }
}

TEST(Tar, OddNamesAndTimes_AreExact) {
  for (std::string name : {std::string("a b\n\t\"'"), std::string("\xff\xfe"),
                           std::string(255, 'n') + "/" + std::string(255, 'm'),
                           std::string(100, 'x'), std::string(101, 'x')}) {
    for (int64_t mtime :
         {int64_t{0}, int64_t{1'234'567'890'123'456'789}, int64_t{-5'500'000'000}}) {
      TarEntry entry{.path = name};
      entry.mtime_ns = mtime;
      auto members = Parse(TarHeader(entry) + TarEnd());
      ASSERT_TRUE(members.ok()) << members.error().ToString();
      EXPECT_EQ((*members)[0].entry.path, name);
      EXPECT_EQ((*members)[0].entry.mtime_ns, mtime);
    }
  }
}

TEST(Tar, SparseFiles_KeepTheirHoles) {
  TarEntry entry{.path = "sparse"};
  entry.size = 500000;
  entry.map = {{1000, 5}, {400000, 3}, {500000, 0}};
  std::string archive = TarHeader(entry);
  EXPECT_EQ(entry.stored, 8u);
  archive += "helloxyz" + std::string(TarPadding(8), '\0') + File("next", "n") + TarEnd();
  for (size_t step : {1u, 700u, 100000u}) {
    auto members = Parse(archive, step);
    ASSERT_TRUE(members.ok()) << members.error().ToString();
    ASSERT_EQ(members->size(), 2u);
    EXPECT_EQ((*members)[0].entry.path, "sparse");
    EXPECT_EQ((*members)[0].entry.size, 500000u);
    std::string expected(500000, '\0');
    expected.replace(1000, 5, "hello");
    expected.replace(400000, 3, "xyz");
    EXPECT_EQ((*members)[0].data, expected);
    EXPECT_EQ((*members)[1].data, "n");
  }
}

TEST(Tar, BrokenArchives_AreRefused) {
  std::string good = File("f", "data") + TarEnd();
  auto refused = [](const std::string& archive) {
    auto members = Parse(archive);
    return members.ok() ? std::string("accepted") : std::string(members.error().reason());
  };
  EXPECT_EQ(refused(good), "accepted");
  EXPECT_EQ(refused(good.substr(0, 600)), "archive.malformed");
  EXPECT_EQ(refused(good.substr(0, 100)), "archive.malformed");
  std::string checksum = good;
  checksum[0] = 'g';
  EXPECT_EQ(refused(checksum), "archive.malformed");
  EXPECT_EQ(refused(std::string(5000, 'x')), "archive.malformed");
  EXPECT_EQ(refused(""), "accepted");
}

// A pax header with these records in front of a file.
std::string WithRecords(const std::string& records) {
  TarEntry extended{.path = "pax"};
  extended.size = records.size();
  std::string header = TarHeader(extended);
  header[156] = 'x';
  uint64_t sum = 0;
  for (size_t i = 0; i < kTarBlock; ++i)
    sum += i >= 148 && i < 156 ? ' ' : static_cast<unsigned char>(header[i]);
  header.replace(148, 8, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return header + records + std::string(TarPadding(records.size()), '\0') + File("f", "data") +
         TarEnd();
}

TEST(Tar, HostilePaxRecords_AreRefused) {
  ASSERT_TRUE(Parse(WithRecords("13 path=name\n")).ok());
  EXPECT_EQ((*Parse(WithRecords("13 path=name\n")))[0].entry.path, "name");
  for (const char* records :
       {"5 a\n", "99 path=x\n", "0 path=x\n", "18446744073709551616 a=b\n", "x path=y\n",
        "9 nothing\n", "13 size=-1234\n", "29 size=99999999999999999999\n",
        "24 mtime=99999999999999\n", "22 GNU.sparse.major=2\n", "20 GNU.sparse.map=1\n"}) {
    EXPECT_FALSE(Parse(WithRecords(records)).ok()) << records;
  }
  EXPECT_FALSE(Parse(WithRecords("22 GNU.sparse.major=1\n30 GNU.sparse.realsize=1000000\n")).ok());
}

RC_GTEST_PROP(Tar, AnyBytes_NeverCrash, (const std::vector<uint8_t>& noise, uint16_t position)) {
  std::string archive =
      File("f", std::string(3000, 'x')) + File(std::string(150, 'y'), "z") + TarEnd();
  size_t at = position % archive.size();
  archive.replace(at, std::min(noise.size(), archive.size() - at),
                  std::string(noise.begin(), noise.end()).substr(0, archive.size() - at));
  auto members = Parse(archive, 1 + noise.size() % 700);
  if (!members.ok()) RC_ASSERT(members.error().code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace dsec::aether
