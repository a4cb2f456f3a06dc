// SPDX-License-Identifier: Apache-2.0
// The format against files that testing/lsmt_by_hand.py has made and against what it reads.
#include "disk/lsmt.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "disk/layer.h"
#include "disk/layer_writer.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string kTesting = DSEC_DISK_TESTING;

std::string Golden(const std::string& name) { return kTesting + "/golden/" + name; }

std::string RunJudge(const std::string& words) {
  const std::string command = "/usr/bin/python3 -B " + kTesting + "/lsmt_by_hand.py " + words;
  FILE* pipe = ::popen(command.c_str(), "re");
  std::string out;
  char buffer[4096];
  for (size_t got = 0; (got = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;)
    out.append(buffer, got);
  EXPECT_EQ(::pclose(pipe), 0) << command;
  return out;
}

Extent Data(uint64_t first, uint32_t count, uint64_t place, uint16_t layer = 0) {
  return {first, place, count, layer, false};
}
Extent Zeros(uint64_t first, uint32_t count) { return {first, 0, count, 0, true}; }

std::vector<uint8_t> ReadChain(std::span<const std::shared_ptr<const Layer>> layers) {
  std::vector<uint8_t> disk(layers.back()->info.virtual_bytes);
  const auto merged = MergeChain(layers).value();
  for (const Extent& extent : merged) {
    EXPECT_TRUE(layers[extent.layer]
                    ->file
                    ->ReadNow(extent.place * kSectorBytes,
                              std::span(disk).subspan(extent.first * kSectorBytes,
                                                      extent.count * uint64_t{kSectorBytes}))
                    .ok());
  }
  return disk;
}

TEST(Lsmt, GoldenFiles_AreReadAsTheirWriterSays) {
  const auto lower = OpenLayerAt(AT_FDCWD, Golden("lower.lsmt")).value();
  EXPECT_EQ(lower->info.virtual_bytes, 65536u);
  EXPECT_EQ(lower->info.uuid, "11111111-2222-4333-8444-555555555555");
  EXPECT_EQ(lower->info.parent_uuid, "");
  EXPECT_EQ(lower->info.user_tag, "made by hand");
  EXPECT_THAT(lower->ReadIndex().value(),
              ElementsAre(Data(0, 4, 8), Data(10, 1, 12), Data(20, 30, 13), Data(120, 8, 43)));
  const auto upper = OpenLayerAt(AT_FDCWD, Golden("upper.lsmt")).value();
  EXPECT_EQ(upper->info.parent_uuid, lower->info.uuid);
  EXPECT_THAT(upper->ReadIndex().value(), ElementsAre(Data(2, 3, 8), Zeros(8, 4), Data(25, 5, 11),
                                                      Zeros(40, 2), Data(127, 1, 16)));
  const std::vector<std::shared_ptr<const Layer>> chain = {lower, upper};
  const std::string flat = os::ReadFile(AT_FDCWD, Golden("flat.raw").c_str(), 1 << 20).value();
  EXPECT_EQ(ReadChain(chain), std::vector<uint8_t>(flat.begin(), flat.end()));
}

TEST(Lsmt, WhatIsWritten_TheJudgeReadsTheSame) {
  auto dir = os::TempDir::Create("dsec-disk-").value();
  const std::string path = dir.path() + "/layer";
  LayerInfo info;
  info.uuid = NewUuid();
  info.parent_uuid = NewUuid();
  info.virtual_bytes = 64 << 20;
  info.user_tag = "a tag";
  {
    const auto file = os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR | O_CREAT, 0600).value();
    auto writer = LayerWriter::Create(file.get(), info).value();
    ASSERT_TRUE(writer.AddData(3, std::vector<uint8_t>(2 * kSectorBytes, 7)).ok());
    ASSERT_TRUE(writer.AddZeros(5, 40000).ok());  // more than an entry can say
    ASSERT_TRUE(writer.AddData(40100, std::vector<uint8_t>(kSectorBytes, 9)).ok());
    EXPECT_FALSE(writer.AddData(40100, std::vector<uint8_t>(kSectorBytes, 9)).ok());
    ASSERT_TRUE(writer.Finish().ok());
  }
  const json said = json::parse(RunJudge("read " + path));
  EXPECT_EQ(said["size"], 64 << 20);
  EXPECT_EQ(said["uuid"], info.uuid);
  EXPECT_EQ(said["parent"], info.parent_uuid);
  EXPECT_EQ(said["tag"], "a tag");
  EXPECT_EQ(
      said["entries"],
      json::parse("[[3,2,8],[5,16383,null],[16388,16383,null],[32771,7234,null],[40100,1,10]]"));
  const auto layer = OpenLayerAt(AT_FDCWD, path).value();
  EXPECT_THAT(layer->ReadIndex().value(),
              ElementsAre(Data(3, 2, 8), Zeros(5, 40000), Data(40100, 1, 10)));
}

TEST(Lsmt, Collapse_OfGoldenFilesIsOneLayerThatTheJudgeFlattensAlike) {
  auto dir = os::TempDir::Create("dsec-disk-").value();
  const std::string path = dir.path() + "/one";
  const std::vector<std::shared_ptr<const Layer>> chain = {
      OpenLayerAt(AT_FDCWD, Golden("lower.lsmt")).value(),
      OpenLayerAt(AT_FDCWD, Golden("upper.lsmt")).value()};
  for (const bool bottom : {true, false}) {
    const auto file = os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600).value();
    const auto info = CollapseTo(file.get(), chain, bottom, {}).value();
    EXPECT_EQ(info.uuid, chain[1]->info.uuid);
    EXPECT_EQ(info.parent_uuid, "");
    RunJudge("flat " + dir.path() + "/flat " + path);
    EXPECT_EQ(os::ReadFile(dir.fd(), "flat", 1 << 20).value(),
              os::ReadFile(AT_FDCWD, Golden("flat.raw").c_str(), 1 << 20).value());
    // Zeros are kept only where something may be below.
    const json said = json::parse(RunJudge("read " + path));
    const auto zeroed =
        std::ranges::count_if(said["entries"], [](const json& e) { return e[2].is_null(); });
    EXPECT_EQ(zeroed, bottom ? 0 : 2);
  }
}

// One byte or number of a good file is changed; the error names what is wrong.
struct Damage {
  const char* name;
  int64_t at;  // from the start, or from the end when negative
  std::string bytes;
  const char* field;
  const char* says;
};

std::string Number(uint64_t value, size_t size = 8) {
  return {reinterpret_cast<const char*>(&value), size};
}

TEST(Lsmt, HostileFile_IsRefusedWithFieldAndRule) {
  const std::string good = os::ReadFile(AT_FDCWD, Golden("upper.lsmt").c_str(), 1 << 20).value();
  const auto index = static_cast<int64_t>(good.size()) - 2 * 4096;
  const int64_t trailer = -4096;
  const uint64_t index_offset = 4096 + 9 * 512;
  ASSERT_EQ(index, static_cast<int64_t>(index_offset));
  const std::vector<Damage> all = {
      {"magic", 0, "X", "magic", "LSMT"},
      {"magic of the trailer", trailer + 9, "X", "magic", "LSMT"},
      {"size", 24, Number(391, 4), "size", "391"},
      {"version", trailer + 132, "\2", "version", "2.1"},
      {"flags", trailer + 28, Number(6 | 64, 4), "flags", "bits 6 to 31"},
      {"not sealed", trailer + 28, Number(2, 4), "flags", "sealed"},
      {"a header in place of the trailer", trailer + 28, Number(7, 4), "flags", "trailer"},
      {"an index file", 28, Number(1, 4), "flags", "data"},
      {"gc", trailer + 28, Number(2 | 4 | 8, 4), "flags", "gc"},
      {"padding", trailer + 4000, "X", "reserved", "zero"},
      {"no disk", trailer + 48, Number(0), "virtual_size", "is 0"},
      {"uneven disk", trailer + 48, Number(65537), "virtual_size", "65537"},
      {"huge disk", trailer + 48, Number(uint64_t{1} << 60), "virtual_size", "allowed"},
      {"uuid", trailer + 56, std::string(37, 'a'), "uuid", "NUL"},
      {"uuid's text", trailer + 56, "\n", "uuid", "0x0a"},
      {"index in the header", trailer + 32, Number(512), "index_offset", "512"},
      {"index nowhere", trailer + 32, Number(UINT64_MAX - 511), "index_offset", "between"},
      {"index uneven", trailer + 32, Number(index_offset + 16), "index_offset", "multiple"},
      {"many entries", trailer + 40, Number(kMaxEntries + 1), "index_size", "at most"},
      {"entries over the trailer", trailer + 40, Number(300), "index_offset", "300 entries"},
      {"more entries that overflow", trailer + 40, Number(UINT64_MAX), "index_size", "at most"},
      {"empty entry", index, Number(2), "index[0].length", "is 0"},
      {"order", index + 16, Number(4 | uint64_t{1} << 50), "index[1].offset", "within"},
      {"past the disk", index + 64, Number(127 | uint64_t{2} << 50), "index[4].length", "128"},
      {"place in the header", index + 8, Number(7), "index[0].moffset", "from 8"},
      {"place in the index", index + 8, Number(15), "index[0].moffset", "to 17"},
      {"place far away", index + 8, Number((uint64_t{1} << 55) - 1), "index[0].moffset", "from 8"},
  };
  auto dir = os::TempDir::Create("dsec-disk-").value();
  for (const Damage& damage : all) {
    std::string bytes = good;
    const auto at = static_cast<size_t>(
        damage.at < 0 ? static_cast<int64_t>(bytes.size()) + damage.at : damage.at);
    bytes.replace(at, damage.bytes.size(), damage.bytes);
    ASSERT_NE(bytes, good) << damage.name;
    ::unlinkat(dir.fd(), "bad", 0);
    ASSERT_TRUE(os::CreateFile(dir.fd(), "bad", bytes, 0600).ok());
    const auto layer = OpenLayerAt(dir.fd(), "bad");
    Result<void> result;
    if (!layer.ok()) {
      result = layer.error();
    } else if (auto read = (*layer)->ReadIndex(); !read.ok()) {
      result = read.error();
    }
    ASSERT_FALSE(result.ok()) << damage.name;
    EXPECT_EQ(result.error().reason(), "disk.bad_layer") << damage.name;
    EXPECT_EQ(result.error().field(), damage.field) << damage.name;
    EXPECT_THAT(result.error().message(), HasSubstr(damage.says)) << damage.name;
  }
  for (const size_t size : {size_t{0}, size_t{100}, size_t{8191}, good.size() - 1}) {
    ::unlinkat(dir.fd(), "bad", 0);
    ASSERT_TRUE(os::CreateFile(dir.fd(), "bad", good.substr(0, size), 0600).ok());
    const auto layer = OpenLayerAt(dir.fd(), "bad");
    ASSERT_FALSE(layer.ok()) << size;
    EXPECT_EQ(layer.error().reason(), "disk.bad_layer") << size;
  }
}

TEST(Lsmt, Chain_WhoseParentsDoNotFitIsRefused) {
  const auto lower = OpenLayerAt(AT_FDCWD, Golden("lower.lsmt")).value();
  const auto upper = OpenLayerAt(AT_FDCWD, Golden("upper.lsmt")).value();
  const std::vector<std::shared_ptr<const Layer>> turned = {upper, lower};
  const auto merged = MergeChain(turned);
  ASSERT_FALSE(merged.ok());
  EXPECT_EQ(merged.error().reason(), "disk.bad_chain");
  EXPECT_EQ(merged.error().field(), "layers[1]");
}

TEST(Lsmt, Entry_KeepsItsLargestValues) {
  std::array<uint8_t, kEntryBytes> bytes;
  const Extent extent = Data((uint64_t{1} << 50) - 1, kMaxEntrySectors, (uint64_t{1} << 55) - 1);
  EncodeEntry(extent, bytes);
  EXPECT_EQ(DecodeEntry(bytes), extent);
  EncodeEntry(Zeros(5, 3), bytes);
  EXPECT_EQ(DecodeEntry(bytes), Zeros(5, 3));
  bytes[15] = 0x55;  // the tag is for run time
  EXPECT_EQ(DecodeEntry(bytes), Zeros(5, 3));
}

}  // namespace
}  // namespace dsec::disk
