// SPDX-License-Identifier: Apache-2.0
#include "image/share_meta.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <semaphore>
#include <utility>

#include "image/chunk_store.h"
#include "image/erofs_format.h"
#include "image/erofs_output.h"
#include "image/root_calls.h"
#include "os/file.h"

namespace dsec::image {
namespace {

using erofs::kBlockBytes;

Error Corrupt(std::string_view what) {
  return Error(Code::kInternal, "layer.corrupt", fmt::format("meta.erofs: {}", what));
}

// Walks the folders of an image and shows the map of each chunked file, once. Every number is taken
// for hostile.
class Walk {
 public:
  using OnMap =
      std::function<Result<void>(uint64_t offset, uint64_t size)>;  // of the map, of the file

  Walk(std::span<uint8_t> meta, OnMap on_map)
      : meta_(meta), on_map_(std::move(on_map)), seen_(meta.size() / erofs::kNidBytes) {}

  Result<erofs::SuperBlock> Run() {
    DSEC_TRY(const auto super, Load<erofs::SuperBlock>(erofs::kSuperOffset));
    constexpr uint32_t kPlain = erofs::kIncompatChunkedFile | erofs::kIncompatDeviceTable;
    if (meta_.size() % kBlockBytes != 0 || super.magic != erofs::kMagic ||
        super.block_bits != erofs::kBlockBits || super.feature_incompat != kPlain ||
        super.extra_devices != 1 || super.meta_block != 0)
      return Corrupt(fmt::format("magic {:x}, features {:x}, {} devices", super.magic,
                                 super.feature_incompat, super.extra_devices));
    DSEC_TRY_VOID(Visit(super.root_nid));
    while (!folders_.empty()) {
      const Node folder = folders_.back();
      folders_.pop_back();
      DSEC_TRY_VOID(ReadFolder(folder));
    }
    return super;
  }

  template <typename T>
  Result<T> Load(uint64_t offset) const {
    if (offset > meta_.size() || meta_.size() - offset < sizeof(T))
      return Corrupt(fmt::format("nothing is at byte {}", offset));
    T value;
    std::memcpy(&value, meta_.data() + offset, sizeof(T));
    return value;
  }

 private:
  struct Node {
    uint64_t body = 0;  // offset of what lies behind inode and xattrs
    uint64_t size = 0;
    uint32_t data = 0;
    uint16_t layout = 0;
  };

  Result<void> Visit(uint64_t nid) {
    if (nid >= seen_.size()) return Corrupt(fmt::format("there is no inode {}", nid));
    if (seen_[nid]) return Ok();
    seen_[nid] = true;
    const uint64_t offset = nid * erofs::kNidBytes;
    DSEC_TRY(const auto compact, Load<erofs::CompactInode>(offset));
    Node node;
    uint64_t head = sizeof(compact);
    node.size = compact.size;
    node.data = compact.data;
    if ((compact.format & erofs::kExtended) != 0) {
      DSEC_TRY(const auto extended, Load<erofs::ExtendedInode>(offset));
      head = sizeof(extended);
      node.size = extended.size;
      node.data = extended.data;
    }
    node.layout = compact.format & ~erofs::kExtended;
    if (compact.xattr_count > 0) {
      head += sizeof(erofs::XattrHeader) + (compact.xattr_count - 1) * sizeof(uint32_t);
    }
    node.body = offset + head;
    if (S_ISDIR(compact.mode)) {
      folders_.push_back(node);
      return Ok();
    }
    if (!S_ISREG(compact.mode)) return Ok();
    constexpr uint32_t kFormat = erofs::kChunkIndexes | 4;  // chunks of 64 KiB
    static_assert(ChunkStore::kChunkBytes == kBlockBytes << 4);
    if (node.layout != erofs::kChunkBased || node.data != kFormat)
      return Corrupt(fmt::format("a file of layout {}, format {:x}", node.layout, node.data));
    // A map is within the metadata, so this bounds the size before it is rounded up.
    const uint64_t map = (node.body + 7) / 8 * 8;
    if (map > meta_.size() ||
        node.size / ChunkStore::kChunkBytes > (meta_.size() - map) / sizeof(erofs::ChunkIndex) ||
        ChunkStore::CountOf(node.size) > (meta_.size() - map) / sizeof(erofs::ChunkIndex))
      return Corrupt(fmt::format("the map of inode {} has no room", nid));
    return on_map_(map, node.size);
  }

  Result<void> ReadFolder(const Node& folder) {
    if (folder.layout != erofs::kFlatPlain && folder.layout != erofs::kFlatInline)
      return Corrupt(fmt::format("a folder of layout {}", folder.layout));
    if (folder.size > meta_.size()) return Corrupt("a folder has no room");
    for (uint64_t done = 0; done < folder.size; done += kBlockBytes) {
      const uint64_t bytes = std::min(kBlockBytes, folder.size - done);
      const bool last_inline =
          folder.layout == erofs::kFlatInline && folder.size - done < kBlockBytes;
      const uint64_t start = last_inline ? folder.body : folder.data * kBlockBytes + done;
      if (start > meta_.size() || meta_.size() - start < bytes)
        return Corrupt("a folder has no room");
      DSEC_TRY_VOID(ReadBlock(start, bytes));
    }
    return Ok();
  }

  Result<void> ReadBlock(uint64_t start, uint64_t bytes) {
    DSEC_TRY(const auto first, Load<erofs::Dirent>(start));
    const uint64_t count = first.name_offset / sizeof(erofs::Dirent);
    if (count == 0 || count * sizeof(erofs::Dirent) > bytes)
      return Corrupt(fmt::format("a folder's block of {} names", count));
    for (uint64_t i = 0; i < count; ++i) {
      DSEC_TRY(const auto entry, Load<erofs::Dirent>(start + i * sizeof(erofs::Dirent)));
      if (entry.nid_high != 0) return Corrupt("an inode number of more than 32 bits");
      DSEC_TRY_VOID(Visit(entry.nid_low));
    }
    return Ok();
  }

  const std::span<uint8_t> meta_;
  const OnMap on_map_;
  std::vector<bool> seen_;
  std::vector<Node> folders_;
};

constexpr int kTurns = 2;
std::counting_semaphore<kTurns> turns(kTurns);
std::atomic<int> held = 0;
std::atomic<int> most_held = 0;

uint32_t BlocksOf(uint64_t file_size, uint64_t chunk) {
  const uint64_t bytes =
      std::min(ChunkStore::kChunkBytes, file_size - chunk * ChunkStore::kChunkBytes);
  return static_cast<uint32_t>((bytes + kBlockBytes - 1) / kBlockBytes);
}

}  // namespace

MetaTurn::MetaTurn() {
  turns.acquire();
  const int now = ++held;
  int most = most_held;
  while (now > most && !most_held.compare_exchange_weak(most, now)) {
  }
}

MetaTurn::~MetaTurn() {
  --held;
  turns.release();
}

int MetaTurn::most() { return most_held; }

Result<std::vector<uint8_t>> ReadMeta(int fd, uint64_t size) {
  if (size > kMaxSharedMeta)
    return Corrupt(fmt::format("{} bytes, too many to share content", size));
  std::vector<uint8_t> meta(size);
  for (uint64_t done = 0; done < size;) {
    const ssize_t got =
        ::pread(fd, meta.data() + done, meta.size() - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return RootError(os::ErrnoError("layer.io", "read the metadata of a layer"));
    if (got == 0) return Corrupt(fmt::format("ends at byte {}", done));
    done += static_cast<uint64_t>(got);
  }
  return meta;
}

Result<void> ShareMeta(std::span<uint8_t> meta, const StoredForm& form) {
  const FormMap map(form);
  Walk walk(meta, [&](uint64_t offset, uint64_t size) -> Result<void> {
    for (uint64_t i = 0; i < ChunkStore::CountOf(size); ++i) {
      uint8_t* at = meta.data() + offset + i * sizeof(erofs::ChunkIndex);
      erofs::ChunkIndex index;
      std::memcpy(&index, at, sizeof(index));
      if (index.block == erofs::kNoBlock) continue;
      const FormMap::Place place = map.Find(index.block);
      if (index.device != 1 || place.blocks < BlocksOf(size, i))
        return Corrupt(fmt::format("a chunk at block {} of device {} is not in one place",
                                   index.block, index.device));
      index.device = static_cast<uint16_t>(place.file + 1);
      index.block = place.block;
      std::memcpy(at, &index, sizeof(index));
    }
    return Ok();
  });
  DSEC_TRY(auto super, walk.Run());
  // The kernel takes the table from wherever the superblock says; before it nothing lies.
  static_assert(StoredForm::kMaxFiles * erofs::kSlotBytes <= erofs::kSuperOffset);
  super.extra_devices = static_cast<uint16_t>(form.files.size());
  super.device_slot = 0;
  for (size_t i = 0; i < form.files.size(); ++i) {
    erofs::DeviceSlot slot = {};
    slot.blocks = static_cast<uint32_t>(form.files[i].size / kBlockBytes);
    std::memcpy(meta.data() + i * sizeof(slot), &slot, sizeof(slot));
  }
  super.checksum = 0;
  std::memcpy(meta.data() + erofs::kSuperOffset, &super, sizeof(super));
  super.checksum = erofs::Checksum(meta.first(kBlockBytes));
  std::memcpy(meta.data() + erofs::kSuperOffset, &super, sizeof(super));
  return Ok();
}

Result<std::vector<BlobExtent>> ChunksOf(std::span<uint8_t> meta) {
  std::vector<BlobExtent> chunks;
  Walk walk(meta, [&](uint64_t offset, uint64_t size) -> Result<void> {
    for (uint64_t i = 0; i < ChunkStore::CountOf(size); ++i) {
      erofs::ChunkIndex index;
      std::memcpy(&index, meta.data() + offset + i * sizeof(index), sizeof(index));
      if (index.block == erofs::kNoBlock) continue;
      if (index.device != 1) return Corrupt(fmt::format("a chunk of device {}", index.device));
      chunks.push_back({index.block, BlocksOf(size, i)});
    }
    return Ok();
  });
  DSEC_TRY_VOID(walk.Run());
  std::ranges::sort(chunks, {},
                    [](const BlobExtent& chunk) { return std::pair(chunk.block, chunk.blocks); });
  const auto equal = std::ranges::unique(chunks);
  chunks.erase(equal.begin(), equal.end());
  for (size_t i = 1; i < chunks.size(); ++i) {
    if (chunks[i].block - chunks[i - 1].block < chunks[i - 1].blocks)
      return Corrupt(fmt::format("two chunks lie at block {}", chunks[i].block));
  }
  return chunks;
}

}  // namespace dsec::image
