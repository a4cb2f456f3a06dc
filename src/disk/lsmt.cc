// SPDX-License-Identifier: Apache-2.0
#include "disk/lsmt.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/rng.h"

namespace dsec::disk {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::array<uint8_t, 24> kMagic = {'L',  'S',  'M',  'T',  0,    1,    2,    0,
                                            0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C,
                                            0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A};
constexpr uint32_t kStructBytes = 390;
constexpr uint8_t kVersion = 1;
constexpr uint8_t kSubVersion = 1;

constexpr size_t kSizeAt = 24, kFlagsAt = 28, kIndexOffsetAt = 32, kIndexSizeAt = 40,
                 kVirtualSizeAt = 48, kUuidAt = 56, kParentAt = 93, kVersionAt = 132,
                 kSubVersionAt = 133, kTagAt = 134;
constexpr size_t kUuidField = 37, kTagField = 256;

constexpr unsigned kFirstBits = 50, kPlaceBits = 55, kZeroBit = 55;
constexpr uint64_t kFirstMask = (uint64_t{1} << kFirstBits) - 1;
constexpr uint64_t kPlaceMask = (uint64_t{1} << kPlaceBits) - 1;

template <typename T>
T Get(std::span<const uint8_t> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <typename T>
void Put(std::span<uint8_t> bytes, size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}

void PutText(std::span<uint8_t> bytes, size_t at, size_t field, const std::string& text) {
  std::memcpy(bytes.data() + at, text.data(), std::min(text.size(), field - 1));
}

// Ends with its first NUL, which must be there.
Result<std::string> GetText(std::span<const uint8_t> bytes, size_t at, size_t field,
                            const char* name, bool printable) {
  const auto part = bytes.subspan(at, field);
  const auto end = std::ranges::find(part, 0);
  if (end == part.end())
    return BadLayer(name, fmt::format("has no NUL within its {} bytes", field));
  std::string text(part.begin(), end);
  const auto odd = std::ranges::find_if(text, [](char c) { return c <= ' ' || c > '~'; });
  if (printable && odd != text.end()) {
    return BadLayer(name, fmt::format("has byte 0x{:02x}; printable ASCII is allowed",
                                      static_cast<uint8_t>(*odd)));
  }
  return text;
}

Result<void> CheckVirtualSize(uint64_t bytes) {
  if (bytes == 0 || bytes % kSectorBytes != 0 || bytes > kMaxDiskBytes) {
    return BadLayer("virtual_size", fmt::format("is {}; 512 to {} in steps of 512 are allowed",
                                                bytes, kMaxDiskBytes));
  }
  return Ok();
}

}  // namespace

Error BadLayer(std::string field, std::string_view rule) {
  Error error(Code::kInvalidArgument, "disk.bad_layer", fmt::format("{} {}", field, rule));
  return std::move(error).WithField(std::move(field));
}

Result<void> CheckDiskBytes(uint64_t bytes) {
  if (bytes != 0 && bytes % kSectorBytes == 0 && bytes <= kMaxDiskBytes) return Ok();
  return Error(Code::kInvalidArgument, "disk.size",
               fmt::format("a disk of {} bytes; 512 to {} in steps of 512 are allowed", bytes,
                           kMaxDiskBytes))
      .WithField("size");
}

HeaderBlock EncodeHeader(const LayerInfo& info) {
  HeaderBlock block{};
  std::ranges::copy(kMagic, block.begin());
  Put(block, kSizeAt, kStructBytes);
  Put(block, kFlagsAt, info.flags);
  Put(block, kIndexOffsetAt, info.index_offset);
  Put(block, kIndexSizeAt, info.index_entries);
  Put(block, kVirtualSizeAt, info.virtual_bytes);
  PutText(block, kUuidAt, kUuidField, info.uuid);
  PutText(block, kParentAt, kUuidField, info.parent_uuid);
  block[kVersionAt] = kVersion;
  block[kSubVersionAt] = kSubVersion;
  PutText(block, kTagAt, kTagField, info.user_tag);
  return block;
}

Result<LayerInfo> ParseHeader(std::span<const uint8_t> block) {
  if (block.size() != kHeaderBytes)
    return BadLayer("header", fmt::format("has {} bytes of {}", block.size(), kHeaderBytes));
  if (!std::ranges::equal(block.first(kMagic.size()), kMagic))
    return BadLayer("magic", "is not that of LSMT");
  const auto size = Get<uint32_t>(block, kSizeAt);
  if (size != kStructBytes)
    return BadLayer("size", fmt::format("is {}, not {}", size, kStructBytes));
  if (block[kVersionAt] != kVersion || block[kSubVersionAt] != kSubVersion) {
    return BadLayer("version", fmt::format("is {}.{}, not {}.{}", block[kVersionAt],
                                           block[kSubVersionAt], kVersion, kSubVersion));
  }
  if (std::ranges::any_of(block.subspan(kStructBytes), [](uint8_t byte) { return byte != 0; }))
    return BadLayer("reserved", "is not zero");
  LayerInfo info;
  info.flags = Get<uint32_t>(block, kFlagsAt);
  if ((info.flags & ~kKnownFlags) != 0)
    return BadLayer("flags", fmt::format("is 0x{:x}; bits 6 to 31 must be 0", info.flags));
  info.index_offset = Get<uint64_t>(block, kIndexOffsetAt);
  info.index_entries = Get<uint64_t>(block, kIndexSizeAt);
  info.virtual_bytes = Get<uint64_t>(block, kVirtualSizeAt);
  DSEC_TRY(info.uuid, GetText(block, kUuidAt, kUuidField, "uuid", true));
  DSEC_TRY(info.parent_uuid, GetText(block, kParentAt, kUuidField, "parent_uuid", true));
  DSEC_TRY(info.user_tag, GetText(block, kTagAt, kTagField, "user_tag", false));
  // A header that was not written again says little.
  if ((info.flags & kIsHeader) == 0 || (info.flags & kInfoValid) != 0)
    DSEC_TRY_VOID(CheckVirtualSize(info.virtual_bytes));
  return info;
}

Result<LayerInfo> ParseTrailer(std::span<const uint8_t> block, uint64_t file_bytes) {
  DSEC_TRY(auto info, ParseHeader(block));
  if ((info.flags & (kIsHeader | kIsData | kIsSealed)) != (kIsData | kIsSealed)) {
    return BadLayer("flags", fmt::format("of the trailer is 0x{:x}: it must be a trailer (bit 0 "
                                         "is 0), of data (bit 1), sealed (bit 2)",
                                         info.flags));
  }
  if ((info.flags & (kIsGcLayer | kIsSparse)) != 0) {
    return BadLayer("flags", fmt::format("of the trailer is 0x{:x}: gc and sparse layers have no "
                                         "place here",
                                         info.flags));
  }
  if (info.index_entries > kMaxEntries) {
    return BadLayer("index_size",
                    fmt::format("is {}, {} at most are allowed", info.index_entries, kMaxEntries));
  }
  if (file_bytes < 2 * kHeaderBytes || info.index_offset < kHeaderBytes ||
      info.index_offset % kSectorBytes != 0 || info.index_offset > file_bytes - kHeaderBytes ||
      info.index_entries * kEntryBytes > file_bytes - kHeaderBytes - info.index_offset) {
    return BadLayer("index_offset",
                    fmt::format("is {} with {} entries: they must lie, at a multiple of 512, "
                                "between header and trailer of a file of {} bytes",
                                info.index_offset, info.index_entries, file_bytes));
  }
  return info;
}

void EncodeEntry(const Extent& extent, std::span<uint8_t, kEntryBytes> out) {
  Put(out, 0, (extent.first & kFirstMask) | (uint64_t{extent.count} << kFirstBits));
  Put(out, 8, extent.zero ? uint64_t{1} << kZeroBit : extent.place & kPlaceMask);
}

Extent DecodeEntry(std::span<const uint8_t, kEntryBytes> bytes) {
  const auto low = Get<uint64_t>(bytes, 0);
  const auto high = Get<uint64_t>(bytes, 8);
  Extent extent;
  extent.first = low & kFirstMask;
  extent.count = static_cast<uint32_t>(low >> kFirstBits);
  extent.zero = ((high >> kZeroBit) & 1) != 0;
  extent.place = extent.zero ? 0 : high & kPlaceMask;
  return extent;
}

uint64_t EntriesFor(std::span<const Extent> extents) {
  uint64_t entries = 0;
  for (const Extent& extent : extents)
    entries += (uint64_t{extent.count} + kMaxEntrySectors - 1) / kMaxEntrySectors;
  return entries;
}

std::vector<uint8_t> EncodeIndex(std::span<const Extent> extents) {
  std::vector<uint8_t> bytes(EntriesFor(extents) * kEntryBytes);
  size_t at = 0;
  for (const Extent& extent : extents) {
    for (uint64_t first = extent.first; first < extent.end(); at += kEntryBytes) {
      const uint64_t end = std::min<uint64_t>(extent.end(), first + kMaxEntrySectors);
      EncodeEntry(Clip(extent, first, end),
                  std::span<uint8_t, kEntryBytes>(bytes.data() + at, kEntryBytes));
      first = end;
    }
  }
  return bytes;
}

Result<std::vector<Extent>> ParseIndex(std::span<const uint8_t> bytes, const LayerInfo& info) {
  if (bytes.size() != info.index_entries * kEntryBytes) {
    return BadLayer("index_size", fmt::format("is {}, {} bytes of index are there",
                                              info.index_entries, bytes.size()));
  }
  const uint64_t disk_end = info.virtual_bytes / kSectorBytes;
  const uint64_t data_end = info.index_offset / kSectorBytes;
  std::vector<Extent> extents;
  uint64_t done = 0;
  for (uint64_t i = 0; i < info.index_entries; ++i) {
    const Extent extent = DecodeEntry(
        std::span<const uint8_t, kEntryBytes>(bytes.data() + i * kEntryBytes, kEntryBytes));
    const auto bad = [&](const char* field, std::string_view rule) {
      return BadLayer(fmt::format("index[{}].{}", i, field), rule);
    };
    if (extent.count == 0) return bad("length", "is 0");
    if (extent.first < done)
      return bad("offset", fmt::format("is {}, within or before the entry in front of it, which "
                                       "ends at {}",
                                       extent.first, done));
    if (extent.end() > disk_end) {
      return bad("length", fmt::format("is {} at {}: past the {} sectors of the disk", extent.count,
                                       extent.first, disk_end));
    }
    if (!extent.zero &&
        (extent.place < kHeaderBytes / kSectorBytes || extent.place + extent.count > data_end)) {
      return bad("moffset",
                 fmt::format("is {} with {} sectors: data lie from {} to {}", extent.place,
                             extent.count, kHeaderBytes / kSectorBytes, data_end));
    }
    done = extent.end();
    Append(extents, extent);
  }
  return extents;
}

std::string NewUuid() {
  std::array<uint8_t, 16> bytes;
  SecureRandom(bytes);
  bytes[6] = static_cast<uint8_t>((bytes[6] & 0x0F) | 0x40);  // RFC 9562, version 4
  bytes[8] = static_cast<uint8_t>((bytes[8] & 0x3F) | 0x80);
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", bytes[i]);
  }
  return text;
}

bool IsUuid(std::string_view text) {
  return text.size() == kUuidChars && std::ranges::all_of(text, [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || c == '-';
         });
}

}  // namespace dsec::disk
