// SPDX-License-Identifier: Apache-2.0
// What EROFS looks like on disk: the part of Linux fs/erofs/erofs_fs.h that layers use. All numbers
// are little-endian, as are the hosts that this is built for.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace dsec::image::erofs {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint64_t kBlockBytes = 4096;
inline constexpr uint8_t kBlockBits = 12;
inline constexpr uint64_t kSuperOffset = 1024;
inline constexpr uint32_t kMagic = 0xE0F5E1E2;

inline constexpr uint32_t kCompatChecksum = 0x1;
inline constexpr uint32_t kCompatMtime = 0x2;
inline constexpr uint32_t kIncompatZeroPadding = 0x1;  // zeros in front of compressed bytes
inline constexpr uint32_t kIncompatCompression = 0x2;  // configs, physical clusters of many blocks
inline constexpr uint32_t kIncompatChunkedFile = 0x4;
inline constexpr uint32_t kIncompatDeviceTable = 0x8;

struct SuperBlock {
  uint32_t magic;
  uint32_t checksum;  // CRC32C of the rest of block 0, with this field 0
  uint32_t feature_compat;
  uint8_t block_bits;
  uint8_t extra_slots;
  uint16_t root_nid;
  uint64_t inodes;
  uint64_t epoch;  // mtime of compact inodes
  uint32_t epoch_nsec;
  uint32_t blocks;
  uint32_t meta_block;
  uint32_t xattr_block;
  std::array<uint8_t, 16> uuid;
  std::array<uint8_t, 16> volume_name;
  uint32_t feature_incompat;
  uint16_t compression;
  uint16_t extra_devices;
  uint16_t device_slot;  // in units of kSlotBytes
  uint8_t dir_block_bits;
  uint8_t xattr_prefix_count;
  uint32_t xattr_prefix_start;
  uint64_t packed_nid;
  std::array<uint8_t, 24> reserved;
};
static_assert(sizeof(SuperBlock) == 128);

// Lies right behind the superblock where that says that there is compression.
struct Lz4Config {
  uint16_t bytes;  // of what follows
  uint16_t max_distance;
  uint16_t max_blocks;  // of a physical cluster
  std::array<uint8_t, 10> reserved;
};
static_assert(sizeof(Lz4Config) == 16);
inline constexpr uint16_t kLz4 = 1;  // of `compression`: this and no other algorithm
inline constexpr uint16_t kLz4ConfigBytes = sizeof(Lz4Config) - sizeof(uint16_t);

inline constexpr uint64_t kSlotBytes = 128;
struct DeviceSlot {
  std::array<uint8_t, 64> tag;
  uint32_t blocks;
  uint32_t mapped_block;  // where it begins when all devices are seen as one
  std::array<uint8_t, 56> reserved;
};
static_assert(sizeof(DeviceSlot) == kSlotBytes);

inline constexpr uint64_t kNidBytes = 32;  // an inode's address is its number times this
inline constexpr uint16_t kExtended = 0x1;
enum Layout : uint16_t {
  kFlatPlain = 0 << 1,
  kCompressedFull = 1 << 1,
  kFlatInline = 2 << 1,
  kChunkBased = 4 << 1
};
inline constexpr uint32_t kNoBlock = UINT32_MAX;

struct CompactInode {
  uint16_t format;
  uint16_t xattr_count;
  uint16_t mode;
  uint16_t links;
  uint32_t size;
  uint32_t reserved;
  uint32_t data;
  uint32_t ino;
  uint16_t uid;
  uint16_t gid;
  uint32_t reserved2;
};
static_assert(sizeof(CompactInode) == 32);

struct ExtendedInode {
  uint16_t format;
  uint16_t xattr_count;
  uint16_t mode;
  uint16_t reserved;
  uint64_t size;
  uint32_t data;
  uint32_t ino;
  uint32_t uid;
  uint32_t gid;
  uint64_t mtime;
  uint32_t mtime_nsec;
  uint32_t links;
  std::array<uint8_t, 16> reserved2;
};
static_assert(sizeof(ExtendedInode) == 64);

// Of a chunk-based inode's `data`: log2 of blocks a chunk, and that its map has ChunkIndex entries.
inline constexpr uint32_t kChunkIndexes = 0x20;
struct ChunkIndex {
  uint16_t block_high;
  uint16_t device;  // 0 is the metadata itself
  uint32_t block;   // kNoBlock: a hole
};
static_assert(sizeof(ChunkIndex) == 8);

// A compressed inode has, at a multiple of 8 behind its xattrs, a MapHeader and a ClusterIndex for
// each logical cluster, here a block. An extent begins at a head; further clusters of it say how
// far that is. Blocks are counted over all devices in a row.
struct MapHeader {
  uint32_t reserved;
  uint16_t advise;
  uint8_t algorithms;    // 0: LZ4
  uint8_t cluster_bits;  // 0: a block
  uint64_t reserved2;    // Z_EROFS_FULL_INDEX_ALIGN
};
static_assert(sizeof(MapHeader) == 16);
inline constexpr uint16_t kBigClusters = 0x2;  // of `advise`: the first continuation has the blocks
enum ClusterType : uint16_t { kPlainHead = 0, kLz4Head = 1, kContinuation = 2 };
inline constexpr uint16_t kBlockCount = 1
                                        << 11;  // flag of a `back` that is the blocks of the extent
struct ClusterIndex {
  uint16_t type;
  uint16_t offset;  // of the extent in its head
  uint32_t where;   // block of a head; of a continuation `back` and, in the upper half, `ahead`
};
static_assert(sizeof(ClusterIndex) == 8);

struct Dirent {
  uint32_t nid_low;
  uint32_t nid_high;
  uint16_t name_offset;
  uint8_t type;
  uint8_t reserved;
};
static_assert(sizeof(Dirent) == 12);
enum FileType : uint8_t {
  kRegular = 1,
  kDirectory = 2,
  kCharDevice = 3,
  kBlockDevice = 4,
  kFifo = 5,
  kSymlink = 7,
};

struct XattrHeader {
  uint32_t name_filter;
  uint8_t shared_count;
  std::array<uint8_t, 7> reserved;
};
static_assert(sizeof(XattrHeader) == 12);

struct XattrEntry {
  uint8_t name_length;
  uint8_t name_index;
  uint16_t value_size;
};
static_assert(sizeof(XattrEntry) == 4);
inline constexpr uint64_t kXattrAlign = 4;
enum XattrIndex : uint8_t {
  kUser = 1,
  kAclAccess = 2,
  kAclDefault = 3,
  kTrusted = 4,
  kSecurity = 6,
};

}  // namespace dsec::image::erofs
