// SPDX-License-Identifier: Apache-2.0
#include "image/tree_builder.h"

#include <limits.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <vector>

#include "image/path.h"

namespace dsec::image {
namespace {

constexpr std::string_view kOverlayPrefix = "trusted.overlay.";
// Widest device number that EROFS and the kernel's user interface hold, include/linux/kdev_t.h
// new_encode_dev().
constexpr uint32_t kMaxMajor = (1 << 12) - 1;
constexpr uint32_t kMaxMinor = (1 << 20) - 1;
// What listxattr(2) and the headers of EROFS can hold of one inode, without what the writer adds
// for overlayfs.
constexpr size_t kOverlayBytes = 64;
constexpr size_t kMaxXattrNames = 65536 - kOverlayBytes;  // XATTR_LIST_MAX, linux/limits.h
constexpr size_t kMaxXattrValue = UINT16_MAX;
constexpr size_t kMaxXattrBytes = 4 * (UINT16_MAX - 1) - kOverlayBytes;

Error Refuse(std::string_view reason, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, std::string(rule));
}

}  // namespace

TreeBuilder::TreeBuilder(Tree& tree, ChunkStore& chunks, const TreeOptions& options,
                         Warnings& warnings)
    : tree_(tree), chunks_(chunks), options_(options), warnings_(warnings) {}

void TreeBuilder::BeginLayer(bool has_whiteouts) {
  has_whiteouts_ = has_whiteouts;
  ++layer_;
}

Result<void> TreeBuilder::Add(const Entry& entry, EntrySource& source) {
  if (proceed_ && !proceed_()) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled while reading");
  }
  DSEC_TRY_VOID(Count(entry));
  DSEC_TRY(const std::string path, CleanPath(entry.path, options_.limits.max_depth));
  return AddInner(entry, path, source).Context("member \"{}\"", Printable(path));
}

Result<void> TreeBuilder::Count(const Entry& entry) {
  const ImportLimits& limits = options_.limits;
  if (++stats_.entries > limits.max_entries) {
    return Refuse("layer.too_many_entries",
                  fmt::format("more than {} entries", limits.max_entries));
  }
  metadata_bytes_ += entry.path.size() + entry.target.size();
  for (const auto& [name, value] : entry.xattrs) metadata_bytes_ += name.size() + value.size();
  if (metadata_bytes_ > limits.max_metadata_bytes) {
    return Refuse("layer.too_large", fmt::format("names and xattrs take more than {} bytes",
                                                 limits.max_metadata_bytes));
  }
  if (entry.type == EntryType::kFile) {
    if (entry.size > limits.max_bytes - stats_.content_bytes) {
      return Refuse("layer.too_large",
                    fmt::format("with member \"{}\" of {} bytes the files hold "
                                "more than {} bytes",
                                Printable(entry.path), entry.size, limits.max_bytes));
    }
    stats_.content_bytes += entry.size;
  }
  return Ok();
}

Result<void> TreeBuilder::AddInner(const Entry& entry, const std::string& path,
                                   EntrySource& source) {
  const auto [parent_path, name] = Split(path);
  if (has_whiteouts_) {
    DSEC_TRY(const Whiteout whiteout, ClassifyWhiteout(path));
    switch (whiteout.kind) {
      case Whiteout::Kind::kNone:
        break;
      case Whiteout::Kind::kRemove:
        return ApplyWhiteout(parent_path, whiteout.target);
      case Whiteout::Kind::kOpaque:
        return ApplyOpaque(parent_path);
      case Whiteout::Kind::kIgnored:
        return Ok();
    }
  }
  if (path.empty()) {
    if (entry.type != EntryType::kDirectory) {
      return Refuse("layer.bad_path", "the root can only be a folder");
    }
    DSEC_TRY(Inode root, Describe(entry, S_IFDIR));
    root.data = Tree::kRoot;
    root.links = 1;
    tree_.inode(Tree::kRoot) = root;
    return Ok();
  }
  if (entry.type == EntryType::kCharDevice && entry.dev_major == 0 && entry.dev_minor == 0 &&
      !options_.keep_whiteouts) {
    if (layer_ > 1 && !has_whiteouts_) return ApplyWhiteout(parent_path, name);
    warnings_.Add(fmt::format("\"{}\": a whiteout has nothing to hide in a base and is left out",
                              Printable(path)));
    return Ok();
  }
  DSEC_TRY(const uint32_t parent, OpenParent(parent_path));
  switch (entry.type) {
    case EntryType::kDirectory:
      return AddDirectory(parent, name, entry);
    case EntryType::kFile:
      return AddFile(parent, name, entry, source);
    case EntryType::kHardlink:
      return AddHardlink(parent, name, entry);
    default:
      return AddSpecial(parent, name, entry);
  }
}

Result<uint32_t> TreeBuilder::OpenParent(std::string_view path) {
  if (parent_ != kNone && parent_path_ == path) return parent_;
  uint32_t folder = Tree::kRoot;
  for (size_t start = 0; start < path.size();) {
    const size_t slash = std::min(path.find('/', start), path.size());
    auto entered = EnterOrMake(folder, path.substr(start, slash - start));
    if (!entered.ok()) {
      return std::move(entered).error().Context("on its way \"{}\"",
                                                Printable(path.substr(0, slash)));
    }
    folder = *entered;
    start = slash + 1;
  }
  parent_path_ = path;
  parent_ = folder;
  return folder;
}

Result<uint32_t> TreeBuilder::EnterOrMake(uint32_t folder, std::string_view name) {
  const Name* found = tree_.Find(folder, name);
  if (found == nullptr) return MakeFolder(folder, name);
  const Inode& inode = tree_.inode(found->inode);
  if (inode.is_folder()) return inode.data;
  if (inode.is_link()) return tree_.Walk(folder, tree_.target(inode));
  if (!inode.is_whiteout()) return Refuse("layer.bad_path", "is not a folder of the layer");
  Remove(folder, name);
  DSEC_TRY(const uint32_t made, MakeFolder(folder, name));
  tree_.folder(made).opaque = options_.keep_whiteouts;
  return made;
}

Result<uint32_t> TreeBuilder::MakeFolder(uint32_t parent, std::string_view name) {
  if (tree_.folder(parent).depth >= options_.limits.max_depth) {
    return Refuse("layer.bad_path",
                  fmt::format("the tree is more than {} deep", options_.limits.max_depth));
  }
  return tree_.AddFolder(parent, name, layer_);
}

Result<void> TreeBuilder::ApplyWhiteout(std::string_view parent_path, std::string_view target) {
  DSEC_TRY(const uint32_t parent, OpenParent(parent_path));
  if (const Name* found = tree_.Find(parent, target); found != nullptr) {
    const bool own = found->layer == layer_;
    const Inode& inode = tree_.inode(found->inode);
    if (inode.is_folder()) {
      RemoveLower(inode.data);
      Folder& folder = tree_.folder(inode.data);
      if (own || !folder.names.empty()) {  // something of this layer is in its place
        folder.opaque = folder.opaque || options_.keep_whiteouts;
        return Ok();
      }
    } else if (own) {
      return Ok();
    }
    Remove(parent, target);
  }
  if (!options_.keep_whiteouts) return Ok();
  tree_.Link(parent, target, tree_.AddInode({.data = 0, .mode = S_IFCHR}), layer_);
  return Ok();
}

Result<void> TreeBuilder::ApplyOpaque(std::string_view path) {
  if (path.empty() && options_.keep_whiteouts) {
    return Refuse("layer.bad_whiteout",
                  "hides everything below the layer; overlayfs has no such layer, use a base");
  }
  DSEC_TRY(const uint32_t folder, OpenParent(path));
  RemoveLower(folder);
  Folder& opaque = tree_.folder(folder);
  opaque.opaque = opaque.opaque || options_.keep_whiteouts;
  return Ok();
}

void TreeBuilder::RemoveLower(uint32_t folder) {
  auto& names = tree_.folder(folder).names;
  for (auto next = names.begin(); next != names.end();) {
    const auto [text, name] = *next++;
    const Inode& inode = tree_.inode(name.inode);
    if (inode.is_folder()) RemoveLower(inode.data);
    // A folder that still holds something of this layer stays.
    const bool empty = !inode.is_folder() || tree_.folder(inode.data).names.empty();
    if (name.layer != layer_ && empty) tree_.Unlink(folder, text);
  }
  parent_ = kNone;
}

void TreeBuilder::Remove(uint32_t folder, std::string_view name) {
  parent_ = kNone;
  tree_.Unlink(folder, name);
}

Result<Inode> TreeBuilder::Describe(const Entry& entry, mode_t type) {
  Inode inode;
  inode.mode = static_cast<uint16_t>(type | (type == S_IFLNK ? 0777 : entry.mode & 07777));
  inode.uid = entry.uid;
  inode.gid = entry.gid;
  inode.mtime_sec = entry.mtime_sec;
  inode.mtime_nsec = entry.mtime_nsec;
  DSEC_TRY(inode.xattrs, TakeXattrs(entry, inode.mode));
  return inode;
}

Result<uint32_t> TreeBuilder::TakeXattrs(const Entry& entry, mode_t mode) {
  std::vector<Xattr> kept;
  size_t names = 0;
  size_t bytes = 0;
  for (const auto& [name, value] : entry.xattrs) {
    if (name.starts_with(kOverlayPrefix)) {
      warnings_.Add(fmt::format("\"{}\": xattr {} would steer the overlay and is left out",
                                Printable(entry.path), Printable(name)));
      continue;
    }
    auto xattr = ToXattr(name, value, mode);
    if (!xattr) {
      warnings_.Add(fmt::format("\"{}\": xattr {} is not one that Linux keeps here and is left out",
                                Printable(entry.path), Printable(name)));
      continue;
    }
    names += name.size() + 1;
    bytes += xattr->entry_bytes();
    if (value.size() > kMaxXattrValue || names > kMaxXattrNames || bytes > kMaxXattrBytes) {
      return Refuse("layer.xattr_too_large",
                    fmt::format("xattr {} of {} bytes is more than an inode can hold",
                                Printable(name), value.size()));
    }
    kept.push_back(*std::move(xattr));
  }
  return tree_.xattrs().Intern(kept);
}

Result<void> TreeBuilder::AddDirectory(uint32_t parent, std::string_view name, const Entry& entry) {
  DSEC_TRY(Inode inode, Describe(entry, S_IFDIR));
  Name* found = tree_.Find(parent, name);
  bool opaque = false;
  if (found != nullptr && !tree_.inode(found->inode).is_folder()) {
    Remove(parent, name);
    found = nullptr;
    opaque = options_.keep_whiteouts;  // what was there hid whatever lies below the layer
  }
  if (found == nullptr) {
    DSEC_TRY(const uint32_t made, MakeFolder(parent, name));
    tree_.folder(made).opaque = opaque;
    found = tree_.Find(parent, name);
  }
  if (entry.opaque) {
    const uint32_t folder = tree_.inode(found->inode).data;
    RemoveLower(folder);
    tree_.folder(folder).opaque = options_.keep_whiteouts;
    found = tree_.Find(parent, name);
  }
  // The upper layer's description replaces the lower one's as a whole.
  Inode& kept = tree_.inode(found->inode);
  inode.data = kept.data;
  inode.links = kept.links;
  kept = inode;
  found->layer = layer_;
  return Ok();
}

Result<void> TreeBuilder::AddFile(uint32_t parent, std::string_view name, const Entry& entry,
                                  EntrySource& source) {
  DSEC_TRY(Inode inode, Describe(entry, S_IFREG));
  inode.size = entry.size;
  chunks_.BeginFile();
  uint64_t end = 0;
  while (true) {
    DSEC_TRY(const DataRun run, source.ReadData());
    if (run.bytes.empty()) break;
    if (run.offset < end || run.bytes.size() > entry.size ||
        run.offset > entry.size - run.bytes.size()) {
      return Refuse("layer.malformed", "its data does not fit its size");
    }
    DSEC_TRY_VOID(chunks_.Write(run.offset, run.bytes));
    end = run.offset + run.bytes.size();
    if (proceed_ && !proceed_()) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while reading");
    }
  }
  DSEC_TRY(inode.data, chunks_.EndFile(entry.size));
  if (tree_.Find(parent, name) != nullptr) Remove(parent, name);
  tree_.Link(parent, name, tree_.AddInode(inode), layer_);
  return Ok();
}

Result<void> TreeBuilder::AddSpecial(uint32_t parent, std::string_view name, const Entry& entry) {
  if (entry.dev_major > kMaxMajor || entry.dev_minor > kMaxMinor) {
    return Refuse("layer.malformed", fmt::format("device {}:{} is no device number",
                                                 entry.dev_major, entry.dev_minor));
  }
  mode_t type = S_IFIFO;
  if (entry.type == EntryType::kSymlink) type = S_IFLNK;
  if (entry.type == EntryType::kCharDevice) type = S_IFCHR;
  if (entry.type == EntryType::kBlockDevice) type = S_IFBLK;
  DSEC_TRY(Inode inode, Describe(entry, type));
  if (type == S_IFLNK) {
    if (entry.target.size() >= PATH_MAX) {
      return Refuse("layer.bad_path", fmt::format("leads to a name of {} bytes, at most {}",
                                                  entry.target.size(), PATH_MAX - 1));
    }
    inode.data = tree_.AddTarget(entry.target);
  } else {
    inode.data = static_cast<uint32_t>(::makedev(entry.dev_major, entry.dev_minor));
  }
  if (tree_.Find(parent, name) != nullptr) Remove(parent, name);
  tree_.Link(parent, name, tree_.AddInode(inode), layer_);
  return Ok();
}

Result<void> TreeBuilder::AddHardlink(uint32_t parent, std::string_view name, const Entry& entry) {
  const auto bad = [&](std::string_view rule) {
    return Refuse("layer.bad_hardlink",
                  fmt::format("hard link to \"{}\": {}", Printable(entry.target), rule));
  };
  auto clean = CleanPath(entry.target, options_.limits.max_depth);
  if (!clean.ok() || clean->empty()) return bad("no path inside the layer");
  const auto [target_parent, target_name] = Split(*clean);
  const auto folder = tree_.Walk(Tree::kRoot, target_parent);
  const Name* target = folder.ok() ? tree_.Find(*folder, target_name) : nullptr;
  if (target == nullptr) return bad("there is no such member before it");
  const uint32_t inode = target->inode;
  if (tree_.inode(inode).is_folder()) return bad("is a folder");
  if (Name* existing = tree_.Find(parent, name); existing != nullptr) {
    if (existing->inode == inode) {
      existing->layer = layer_;
      return Ok();
    }
    Remove(parent, name);
    if (tree_.Find(*folder, target_name) == nullptr) {
      return bad("the link takes the place of what it leads to");
    }
  }
  tree_.Link(parent, name, inode, layer_);
  return Ok();
}

}  // namespace dsec::image
