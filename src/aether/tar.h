// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

// POSIX tar (pax interchange format, POSIX.1-2008 "pax") as bytes: no files here. Read also: GNU
// long names and base-256 numbers. Sparse files in both directions as GNU "PAX 1.0" (tar manual,
// appendix D).
namespace dsec::aether {

inline constexpr size_t kTarBlock = 512;

struct TarEntry {
  enum class Type { kFile, kDirectory, kSymlink, kHardlink, kFifo, kDevice, kOther };
  Type type = Type::kFile;
  std::string path = {};  // as it stands in the archive
  std::string link = {};
  uint32_t mode = 0644;
  uint32_t uid = 0;
  uint32_t gid = 0;
  int64_t mtime_ns = 0;
  uint64_t size = 0;    // of the file
  uint64_t stored = 0;  // bytes of data that follow, padding not counted
  // Ranges with data, ascending; empty: all of it.
  std::vector<std::pair<uint64_t, uint64_t>> map = {};
};

// Header blocks of an entry, pax records included, and the sparse map if there is one: then
// `stored` bytes of data in the order of the map must follow, and TarPadding() zeros.
// `entry.stored` is set.
std::string TarHeader(TarEntry& entry);
inline size_t TarPadding(uint64_t stored) {
  return static_cast<size_t>((kTarBlock - stored % kTarBlock) % kTarBlock);
}
// Two zero blocks.
std::string TarEnd();

// Takes an archive in pieces of any size and calls back entry by entry. Hostile input is expected:
// everything is bounded, kInvalidArgument "archive.malformed" ends it for good.
class TarReader {
 public:
  static constexpr size_t kMaxExtended = 1 << 20;  // one pax header or long name
  static constexpr size_t kMaxPath = 4096;
  static constexpr size_t kMaxSparseRanges = 65536;

  struct Sink {
    virtual ~Sink() = default;
    virtual Result<void> OnEntry(const TarEntry& entry) = 0;
    // Data of the last entry, at this offset of the file.
    virtual Result<void> OnData(uint64_t offset, std::string_view data) = 0;
    virtual Result<void> OnEntryEnd() = 0;
  };
  explicit TarReader(Sink& sink) : sink_(sink) {}

  Result<void> Feed(std::string_view data);
  // The end of the input: must come after the last entry's data.
  Result<void> Finish();
  bool ended() const { return ended_; }

 private:
  enum class State { kHeader, kExtended, kSparseMap, kData, kPadding };
  struct Pending {  // what extended headers say of the next entry
    std::string path, link;
    bool has_size = false, has_mtime = false, has_uid = false, has_gid = false, sparse = false;
    uint64_t size = 0, real_size = 0, uid = 0, gid = 0;
    int64_t mtime_ns = 0;
    std::string sparse_name;
  };

  Result<void> OnHeader(std::string_view block);
  Result<void> OnExtended();
  Result<void> ApplyPax(std::string_view records, bool global);
  Result<void> BeginEntry(const char* block, char type, uint64_t size);
  Result<void> TakeSparseMap(std::string_view block);
  Result<void> EnterData();
  Result<void> TakeData(std::string_view data);
  Result<void> EndEntry();

  Sink& sink_;
  State state_ = State::kHeader;
  std::string block_;     // a partial block
  std::string extended_;  // the body of an extended header
  char extended_type_ = 0;
  uint64_t left_ = 0;  // of the present body
  size_t padding_ = 0;
  Pending pending_;
  Pending global_;
  TarEntry entry_;
  std::string map_text_;
  uint64_t map_numbers_ = 0;  // announced
  std::vector<uint64_t> numbers_;
  size_t range_ = 0;
  uint64_t range_done_ = 0;
  bool zero_block_ = false;
  bool ended_ = false;
};

}  // namespace dsec::aether
