// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "disk/extent.h"

// The file format of layers: overlaybd's LSMT, version 1.1 (containerd/overlaybd,
// src/overlaybd/lsmt/format_spec.md). Header 4096 bytes, data, index, trailer 4096 bytes; all
// little-endian. Pure functions; every byte that they read is hostile.
namespace dsec::disk {

inline constexpr uint64_t kHeaderBytes = 4096;
inline constexpr uint64_t kEntryBytes = 16;
inline constexpr uint32_t kMaxEntrySectors = (1u << 14) - 1;
inline constexpr uint64_t kMaxEntries = uint64_t{1} << 24;  // an index of 256 MiB
inline constexpr uint64_t kMaxDiskBytes = uint64_t{64} << 40;
inline constexpr size_t kUuidChars = 36;
inline constexpr size_t kTagChars = 255;

// Bits of the field "flags".
inline constexpr uint32_t kIsHeader = 1u << 0;  // else trailer
inline constexpr uint32_t kIsData = 1u << 1;    // else index file
inline constexpr uint32_t kIsSealed = 1u << 2;
inline constexpr uint32_t kIsGcLayer = 1u << 3;
inline constexpr uint32_t kIsSparse = 1u << 4;
inline constexpr uint32_t kInfoValid = 1u << 5;
inline constexpr uint32_t kKnownFlags = (1u << 6) - 1;

// What header and trailer say.
struct LayerInfo {
  uint32_t flags = 0;
  uint64_t index_offset = 0;  // bytes
  uint64_t index_entries = 0;
  uint64_t virtual_bytes = 0;  // of the disk
  std::string uuid;            // of the state that this layer leads to; at most 36 characters
  std::string parent_uuid;     // of the state that it was made over; empty: none
  std::string user_tag;        // at most 255 bytes
};

using HeaderBlock = std::array<uint8_t, kHeaderBytes>;
HeaderBlock EncodeHeader(const LayerInfo& info);
// Checks magic, sizes, version and reserved bits and texts, and with kInfoValid or in a trailer
// the virtual size; not what depends on the file. kInvalidArgument "disk.bad_layer" with the field.
Result<LayerInfo> ParseHeader(std::span<const uint8_t> block);
// The trailer of a sealed layer in a file of that size.
Result<LayerInfo> ParseTrailer(std::span<const uint8_t> block, uint64_t file_bytes);

void EncodeEntry(const Extent& extent, std::span<uint8_t, kEntryBytes> out);  // count <= max
Extent DecodeEntry(std::span<const uint8_t, kEntryBytes> bytes);
// Splits what is longer than an entry can say.
std::vector<uint8_t> EncodeIndex(std::span<const Extent> extents);
uint64_t EntriesFor(std::span<const Extent> extents);
// `bytes`: the index of `info`, whole. Neighbours are joined.
Result<std::vector<Extent>> ParseIndex(std::span<const uint8_t> bytes, const LayerInfo& info);

Error BadLayer(std::string field, std::string_view rule);
// A disk may have that size: kInvalidArgument "disk.size".
Result<void> CheckDiskBytes(uint64_t bytes);
// Random, version 4, as text.
std::string NewUuid();
// As this project writes them: 36 characters of hex digits and dashes.
bool IsUuid(std::string_view text);

}  // namespace dsec::disk
