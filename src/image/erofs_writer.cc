// SPDX-License-Identifier: Apache-2.0
#include "image/erofs_writer.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "image/erofs_content.h"
#include "image/erofs_format.h"
#include "image/erofs_output.h"

namespace dsec::image {
namespace {

using erofs::kBlockBytes;

constexpr uint64_t kSuperEnd = erofs::kSuperOffset + sizeof(erofs::SuperBlock);
constexpr std::array<uint8_t, 16> kUuid = {0xc1, 0xb9, 0xd5, 0xa2, 0x00, 0x00, 0x40, 0x00,
                                           0x80, 0x00, 0x64, 0x73, 0x65, 0x63, 0x20, 0x6c};
// A folder's or link's last part is kept with the inode up to this size. It may not cross a block,
// which costs a gap; from about 3,000 bytes on that is more than the rest of a block of its own.
constexpr uint64_t kMaxInline = 3000;
constexpr size_t kMaxSharedXattrs = UINT8_MAX;

uint64_t RoundUp(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint8_t TypeOf(const Inode& inode) {
  switch (inode.mode & S_IFMT) {
    case S_IFREG:
      return erofs::kRegular;
    case S_IFDIR:
      return erofs::kDirectory;
    case S_IFLNK:
      return erofs::kSymlink;
    case S_IFCHR:
      return erofs::kCharDevice;
    case S_IFBLK:
      return erofs::kBlockDevice;
    default:
      return erofs::kFifo;
  }
}

// A folder as it lies in its blocks: names in byte order, "." and ".." among them.
struct Listing {
  struct Item {
    std::string_view name;
    uint32_t inode;
  };
  std::vector<Item> items;
  std::vector<size_t> ends;  // of each block: index behind its last item
  uint64_t tail = 0;         // bytes used of the last block
  uint64_t size() const { return (ends.size() - 1) * kBlockBytes + tail; }
};

Listing List(const Tree& tree, const Folder& folder) {
  Listing listing;
  listing.items.reserve(folder.names.size() + 2);
  for (const auto& [name, entry] : folder.names) listing.items.push_back({name, entry.inode});
  listing.items.push_back({".", folder.inode});
  listing.items.push_back({"..", tree.folder(folder.parent).inode});
  std::ranges::sort(listing.items, {}, &Listing::Item::name);
  for (size_t i = 0; i < listing.items.size(); ++i) {
    const uint64_t bytes = sizeof(erofs::Dirent) + listing.items[i].name.size();
    if (listing.tail + bytes > kBlockBytes) {
      listing.ends.push_back(i);
      listing.tail = 0;
    }
    listing.tail += bytes;
  }
  listing.ends.push_back(listing.items.size());
  return listing;
}

class Writer {
 public:
  Writer(const Tree& tree, const ChunkStore& chunks, int fd,
         const std::function<bool(uint64_t)>& proceed)
      : tree_(tree), chunks_(chunks), out_(fd), proceed_(proceed), places_(tree.inode_count()) {
    opaque_.index = erofs::kTrusted;
    opaque_.suffix = "overlay.opaque";  // Documentation/filesystems/overlayfs.rst
    opaque_.value = "y";
    origin_.index = erofs::kTrusted;
    origin_.suffix = "overlay.origin";
    holds_whiteouts_.resize(tree.inode_count());
  }

  Result<MetaImage> Run() {
    image_.entries = 0;
    Order(Tree::kRoot);
    ChooseEpoch();
    ShareXattrs();
    FindCompressed();
    DSEC_TRY_VOID(PlaceAll());
    PutSuper();
    for (const uint32_t index : order_) {
      DSEC_TRY_VOID(PutInode(index));
      DSEC_TRY_VOID(Step());
    }
    out_.PadToBlock();
    if (!shared_.empty()) {
      DSEC_CHECK(out_.position() == xattr_block_ * kBlockBytes);
      for (const Xattr* xattr : shared_) PutXattr(*xattr);
      out_.PadToBlock();
    }
    for (const uint32_t index : order_) {
      if (places_[index].block == erofs::kNoBlock) continue;
      DSEC_CHECK(out_.position() == places_[index].block * kBlockBytes);
      PutBlocks(index);
      DSEC_TRY_VOID(Step());
    }
    DSEC_CHECK(out_.position() == blocks_ * kBlockBytes);
    DSEC_TRY(image_.digest, out_.Finish());
    return image_;
  }

 private:
  struct Place {
    uint32_t nid = 0;  // 0: none yet
    uint32_t block = erofs::kNoBlock;
    uint32_t links = 0;
    bool extended = false;
    bool tail_inline = false;
  };
  using Attributes = std::vector<const Xattr*>;

  Result<void> Step() {
    constexpr uint64_t kAskEvery = 1 << 10;
    if (++steps_ % kAskEvery == 0 && proceed_ && !proceed_(out_.position())) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while writing the metadata");
    }
    return out_.FlushIfFull();
  }

  // Inodes in the order that they are written: those of one folder together, folders as a walk
  // meets them.
  void Order(uint32_t folder) {
    const Folder& here = tree_.folder(folder);
    if (folder == Tree::kRoot) Meet(here.inode);
    uint32_t folders = 0;
    for (const auto& [name, entry] : here.names) {
      ++image_.entries;
      Meet(entry.inode);
      const Inode& inode = tree_.inode(entry.inode);
      if (inode.is_folder()) ++folders;
      if (inode.is_whiteout() && folder != Tree::kRoot) holds_whiteouts_[here.inode] = true;
    }
    places_[here.inode].links = folders + 2;
    for (const auto& [name, entry] : here.names) {
      const Inode& inode = tree_.inode(entry.inode);
      if (inode.is_folder()) Order(inode.data);
    }
  }

  void Meet(uint32_t index) {
    Place& place = places_[index];
    if (place.links > 0) return;  // a further name of it
    const Inode& inode = tree_.inode(index);
    place.links = inode.links;
    if (inode.is_file()) image_.content_bytes += inode.size;
    order_.push_back(index);
  }

  // The time that most inodes have; those can be compact.
  void ChooseEpoch() {
    std::vector<std::pair<int64_t, uint32_t>> times;
    times.reserve(order_.size());
    for (const uint32_t index : order_) {
      times.emplace_back(tree_.inode(index).mtime_sec, tree_.inode(index).mtime_nsec);
    }
    std::ranges::sort(times);
    size_t most = 0;
    for (size_t start = 0; start < times.size();) {
      size_t end = start;
      while (end < times.size() && times[end] == times[start]) ++end;
      if (end - start > most) {
        most = end - start;
        epoch_ = times[start];
      }
      start = end;
    }
  }

  Attributes AttributesOf(uint32_t index) const {
    const Inode& inode = tree_.inode(index);
    Attributes list;
    if (inode.xattrs != kNone) list = tree_.xattrs().set(inode.xattrs);
    if (inode.is_folder() && tree_.folder(inode.data).opaque) list.push_back(&opaque_);
    // Overlayfs looks for whiteouts in a folder that one layer alone has when this is there
    // (ovl_get_inode in fs/overlayfs/inode.c); else a listing shows them.
    if (holds_whiteouts_[index]) list.push_back(&origin_);
    return list;
  }

  // An attribute that several inodes have is kept once where a reference of 4 bytes is less.
  void ShareXattrs() {
    std::unordered_map<const Xattr*, uint64_t> uses;
    for (const uint32_t index : order_) {
      for (const Xattr* xattr : AttributesOf(index)) ++uses[xattr];
    }
    uint64_t offset = 0;
    for (const uint32_t index : order_) {
      for (const Xattr* xattr : AttributesOf(index)) {
        const uint64_t bytes = xattr->entry_bytes();
        const uint64_t count = uses[xattr];
        if (count * sizeof(uint32_t) + bytes >= count * bytes) continue;
        const auto [place, added] =
            shared_ids_.try_emplace(xattr, static_cast<uint32_t>(offset / erofs::kXattrAlign));
        if (!added) continue;
        shared_.push_back(xattr);
        offset += bytes;
      }
    }
    shared_bytes_ = offset;
  }

  // Moves the shared ones to the front; returns how many they are.
  size_t Split(Attributes& list) const {
    Attributes own;
    size_t shared = 0;
    for (const Xattr* xattr : list) {
      if (shared_ids_.contains(xattr)) {
        list[shared++] = xattr;
      } else {
        own.push_back(xattr);
      }
    }
    std::ranges::copy(own, list.begin() + static_cast<ptrdiff_t>(shared));
    return std::min(kMaxSharedXattrs, shared);
  }

  uint64_t XattrBytes(uint32_t index) const {
    Attributes list = AttributesOf(index);
    if (list.empty()) return 0;
    const size_t shared = Split(list);
    uint64_t bytes = sizeof(erofs::XattrHeader) + shared * sizeof(uint32_t);
    for (size_t i = shared; i < list.size(); ++i) bytes += list[i]->entry_bytes();
    return bytes;
  }

  // Without a compressed file the image is the one that no compression gives.
  void FindCompressed() {
    image_.compressed = std::ranges::any_of(order_, [this](uint32_t index) {
      const Inode& inode = tree_.inode(index);
      return inode.is_file() && chunks_.IsCompressed(inode.data, inode.size);
    });
    device_position_ =
        RoundUp(kSuperEnd + (image_.compressed ? sizeof(erofs::Lz4Config) : 0), erofs::kSlotBytes);
  }

  // Bytes that the inode's own content has in the image.
  uint64_t SizeOf(const Inode& inode) const {
    if (inode.is_folder()) return List(tree_, tree_.folder(inode.data)).size();
    if (inode.is_link()) return tree_.target(inode).size();
    return inode.is_file() ? inode.size : 0;
  }

  bool FitsCompact(const Inode& inode, uint32_t links, uint64_t size) const {
    return inode.mtime_sec == epoch_.first && inode.mtime_nsec == epoch_.second &&
           inode.uid <= UINT16_MAX && inode.gid <= UINT16_MAX && links <= UINT16_MAX &&
           size <= UINT32_MAX;
  }

  // Gives every inode its number and every folder that needs them its blocks.
  Result<void> PlaceAll() {
    uint64_t position = device_position_ + sizeof(erofs::DeviceSlot);
    std::vector<std::pair<uint32_t, uint64_t>> with_blocks;
    for (const uint32_t index : order_) {
      const Inode& inode = tree_.inode(index);
      Place& place = places_[index];
      const uint64_t size = SizeOf(inode);
      place.extended = !FitsCompact(inode, place.links, size);
      uint64_t head =
          (place.extended ? sizeof(erofs::ExtendedInode) : sizeof(erofs::CompactInode)) +
          XattrBytes(index);
      uint64_t body = 0;
      position = RoundUp(position, erofs::kNidBytes);
      if (inode.is_file()) {
        head = RoundUp(head, sizeof(uint64_t));
        body = erofs::ContentOf(inode, chunks_).map_bytes;
      } else if (inode.is_folder() || inode.is_link()) {
        const uint64_t tail = size % kBlockBytes;
        place.tail_inline = tail > 0 && tail <= kMaxInline;
        if (place.tail_inline) {
          body = tail;
          const uint64_t left = kBlockBytes - (position + head) % kBlockBytes;
          if (body > left) position = RoundUp(position + left, erofs::kNidBytes);
        }
        const uint64_t blocks = size / kBlockBytes + (tail > 0 && !place.tail_inline ? 1 : 0);
        if (blocks > 0) with_blocks.emplace_back(index, blocks);
      }
      if (position / erofs::kNidBytes > UINT32_MAX) return TooLarge();
      place.nid = static_cast<uint32_t>(position / erofs::kNidBytes);
      position += head + body;
    }
    uint64_t block = RoundUp(position, kBlockBytes) / kBlockBytes;
    if (!shared_.empty()) {
      xattr_block_ = block;
      block += RoundUp(shared_bytes_, kBlockBytes) / kBlockBytes;
    }
    for (const auto& [index, blocks] : with_blocks) {
      if (block + blocks >= erofs::kNoBlock) return TooLarge();
      places_[index].block = static_cast<uint32_t>(block);
      block += blocks;
    }
    // Compressed content is found by its block in all devices in a row.
    if (image_.compressed && block + chunks_.placed_blocks() >= erofs::kNoBlock) return TooLarge();
    blocks_ = block;
    return Ok();
  }

  static Error TooLarge() {
    return Error(Code::kInvalidArgument, "layer.too_large", "more metadata than EROFS can address");
  }

  void PutSuper() {
    out_.PadTo(erofs::kSuperOffset);
    erofs::SuperBlock super = {};
    super.magic = erofs::kMagic;
    super.feature_compat = erofs::kCompatChecksum | erofs::kCompatMtime;
    super.block_bits = erofs::kBlockBits;
    super.root_nid = static_cast<uint16_t>(places_[tree_.folder(Tree::kRoot).inode].nid);
    super.inodes = order_.size();
    super.epoch = static_cast<uint64_t>(epoch_.first);
    super.epoch_nsec = epoch_.second;
    super.blocks = static_cast<uint32_t>(blocks_);
    super.xattr_block = static_cast<uint32_t>(xattr_block_);
    super.uuid = kUuid;
    super.feature_incompat = erofs::kIncompatChunkedFile | erofs::kIncompatDeviceTable;
    super.extra_devices = 1;
    super.device_slot = static_cast<uint16_t>(device_position_ / erofs::kSlotBytes);
    if (image_.compressed) {
      super.feature_incompat |= erofs::kIncompatZeroPadding | erofs::kIncompatCompression;
      super.compression = erofs::kLz4;
    }
    out_.Put(super);
    if (image_.compressed) {
      out_.Put(erofs::Lz4Config{.bytes = erofs::kLz4ConfigBytes,
                                .max_distance = UINT16_MAX,
                                .max_blocks = ChunkStore::kChunkBytes / kBlockBytes,
                                .reserved = {}});
    }
    out_.PadTo(device_position_);
    erofs::DeviceSlot slot = {};
    slot.blocks = chunks_.placed_blocks();
    slot.mapped_block = super.blocks;
    out_.Put(slot);
  }

  Result<void> PutInode(uint32_t index) {
    const Inode& inode = tree_.inode(index);
    const Place& place = places_[index];
    out_.PadTo(place.nid * erofs::kNidBytes);
    std::optional<Listing> listing;
    if (inode.is_folder()) listing = List(tree_, tree_.folder(inode.data));
    const uint64_t size = listing ? listing->size() : SizeOf(inode);
    uint16_t layout = erofs::kFlatPlain;
    uint32_t data = place.block;
    if (inode.is_file()) {
      const erofs::Content content = erofs::ContentOf(inode, chunks_);
      layout = content.layout;
      data = content.data;
    } else if (place.tail_inline) {
      layout = erofs::kFlatInline;
    } else if (!inode.is_folder() && !inode.is_link()) {
      data = inode.data;  // makedev() and the kernel's new_encode_dev() agree in this range
    }
    const uint64_t xattr_bytes = XattrBytes(index);
    const auto xattr_count = static_cast<uint16_t>(
        xattr_bytes == 0 ? 0 : (xattr_bytes - sizeof(erofs::XattrHeader)) / 4 + 1);
    ++ino_;
    if (place.extended) {
      out_.Put(erofs::ExtendedInode{
          .format = static_cast<uint16_t>(layout | erofs::kExtended),
          .xattr_count = xattr_count,
          .mode = inode.mode,
          .reserved = 0,
          .size = size,
          .data = data,
          .ino = ino_,
          .uid = inode.uid,
          .gid = inode.gid,
          .mtime = static_cast<uint64_t>(inode.mtime_sec),
          .mtime_nsec = inode.mtime_nsec,
          .links = place.links,
          .reserved2 = {},
      });
    } else {
      out_.Put(erofs::CompactInode{
          .format = layout,
          .xattr_count = xattr_count,
          .mode = inode.mode,
          .links = static_cast<uint16_t>(place.links),
          .size = static_cast<uint32_t>(size),
          .reserved = 0,
          .data = data,
          .ino = ino_,
          .uid = static_cast<uint16_t>(inode.uid),
          .gid = static_cast<uint16_t>(inode.gid),
          .reserved2 = 0,
      });
    }
    PutXattrs(index);
    if (inode.is_file()) {
      return erofs::PutContentMap(inode, chunks_, static_cast<uint32_t>(blocks_), out_);
    }
    if (place.tail_inline && listing) {
      PutListing(*listing, listing->ends.size() - 1);
    } else if (place.tail_inline) {
      out_.Put(tree_.target(inode));
    }
    return Ok();
  }

  void PutXattrs(uint32_t index) {
    Attributes list = AttributesOf(index);
    if (list.empty()) return;
    const size_t shared = Split(list);
    erofs::XattrHeader header = {};
    header.shared_count = static_cast<uint8_t>(shared);
    out_.Put(header);
    for (size_t i = 0; i < shared; ++i) out_.Put(shared_ids_.at(list[i]));
    for (size_t i = shared; i < list.size(); ++i) PutXattr(*list[i]);
  }

  void PutXattr(const Xattr& xattr) {
    const uint64_t end = out_.position() + xattr.entry_bytes();
    out_.Put(erofs::XattrEntry{
        .name_length = static_cast<uint8_t>(xattr.suffix.size()),
        .name_index = xattr.index,
        .value_size = static_cast<uint16_t>(xattr.value.size()),
    });
    out_.Put(std::string_view(xattr.suffix));
    out_.Put(std::string_view(xattr.value));
    out_.PadTo(end);
  }

  void PutListing(const Listing& listing, size_t block) {
    const size_t first = block == 0 ? 0 : listing.ends[block - 1];
    const std::span items(listing.items.data() + first, listing.ends[block] - first);
    size_t name_offset = items.size() * sizeof(erofs::Dirent);
    for (const Listing::Item& item : items) {
      out_.Put(erofs::Dirent{
          .nid_low = places_[item.inode].nid,
          .nid_high = 0,
          .name_offset = static_cast<uint16_t>(name_offset),
          .type = TypeOf(tree_.inode(item.inode)),
          .reserved = 0,
      });
      name_offset += item.name.size();
    }
    for (const Listing::Item& item : items) out_.Put(item.name);
  }

  void PutBlocks(uint32_t index) {
    const Inode& inode = tree_.inode(index);
    if (inode.is_link()) {
      out_.Put(tree_.target(inode));
      out_.PadToBlock();
      return;
    }
    const Listing listing = List(tree_, tree_.folder(inode.data));
    const size_t count = listing.ends.size() - (places_[index].tail_inline ? 1 : 0);
    for (size_t block = 0; block < count; ++block) {
      PutListing(listing, block);
      out_.PadToBlock();
    }
  }

  const Tree& tree_;
  const ChunkStore& chunks_;
  erofs::Output out_;
  const std::function<bool(uint64_t)>& proceed_;
  MetaImage image_;
  Xattr opaque_;
  Xattr origin_;                       // empty: of a file that is not known
  std::vector<bool> holds_whiteouts_;  // by inode, of folders but the root
  std::vector<Place> places_;
  std::vector<uint32_t> order_;
  std::pair<int64_t, uint32_t> epoch_ = {};
  std::vector<const Xattr*> shared_;
  std::unordered_map<const Xattr*, uint32_t> shared_ids_;
  uint64_t shared_bytes_ = 0;
  uint64_t device_position_ = 0;
  uint64_t xattr_block_ = 0;
  uint64_t blocks_ = 0;
  uint64_t steps_ = 0;
  uint32_t ino_ = 0;
};

}  // namespace

Result<MetaImage> WriteErofs(const Tree& tree, const ChunkStore& chunks, int fd,
                             const std::function<bool(uint64_t)>& proceed) {
  return Writer(tree, chunks, fd, proceed).Run();
}

}  // namespace dsec::image
