// SPDX-License-Identifier: Apache-2.0
#include "image/testing/unpacker.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "image/fs.h"
#include "image/path.h"
#include "os/file.h"

namespace dsec::image::testing {
namespace {

constexpr char kOpaqueXattr[] =
    "trusted.overlay.opaque";  // Documentation/filesystems/overlayfs.rst
constexpr char kOriginXattr[] = "trusted.overlay.origin";
constexpr std::string_view kOverlayPrefix = "trusted.overlay.";
constexpr uint64_t kSpaceCheckBytes = 64 << 20;
// Widest device number that EROFS and the kernel's user interface hold, include/linux/kdev_t.h
// new_encode_dev().
constexpr uint32_t kMaxMajor = (1 << 12) - 1;
constexpr uint32_t kMaxMinor = (1 << 20) - 1;

Error Refuse(std::string_view reason, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, std::string(rule));
}

bool IsWhiteout(const struct stat& status) {
  return S_ISCHR(status.st_mode) && status.st_rdev == 0;
}

Result<uint64_t> InodeOf(int fd) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return StoreError("stat a folder");
  return static_cast<uint64_t>(status.st_ino);
}

// False when nothing is there.
Result<bool> StatAt(int dirfd, const std::string& name, struct stat& out) {
  if (::fstatat(dirfd, name.c_str(), &out, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (errno == ENOENT) return false;
  return StoreError("stat");
}

// A way to name the entry itself, link or not, to the xattr calls.
std::string ProcPath(int dirfd, const std::string& name) {
  return fmt::format("/proc/self/fd/{}/{}", dirfd, name);
}

Result<void> MarkOpaque(int fd) {
  if (::fsetxattr(fd, kOpaqueXattr, "y", 1, 0) != 0) return StoreError("mark a folder opaque");
  return Ok();
}

}  // namespace

Unpacker::Unpacker(os::UniqueFd tree, const UnpackOptions& options, Warnings& warnings)
    : tree_(std::move(tree)), options_(options), warnings_(warnings) {}

std::string Unpacker::Key(uint64_t folder_inode, std::string_view name) {
  std::string key(reinterpret_cast<const char*>(&folder_inode), sizeof(folder_inode));
  key += name;
  return key;
}

void Unpacker::BeginLayer(bool has_whiteouts) {
  has_whiteouts_ = has_whiteouts;
  touched_.clear();
}

Result<void> Unpacker::Add(const Entry& entry, EntrySource& source) {
  if (proceed_ && !proceed_()) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled while unpacking");
  }
  DSEC_TRY_VOID(Count(entry));
  DSEC_TRY(const std::string path, CleanPath(entry.path, options_.limits.max_depth));
  return AddInner(entry, path, source).Context("member \"{}\"", Printable(path));
}

Result<void> Unpacker::Count(const Entry& entry) {
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

Result<void> Unpacker::AddInner(const Entry& entry, const std::string& path, EntrySource& source) {
  const auto [parent_path, base] = Split(path);
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
    return SetDirectory(tree_.get(), entry);
  }
  if (entry.type == EntryType::kCharDevice && entry.dev_major == 0 && entry.dev_minor == 0 &&
      !options_.keep_whiteouts) {
    warnings_.Add(fmt::format("\"{}\": a whiteout has nothing to hide in a base and is left out",
                              Printable(path)));
    return Ok();
  }
  DSEC_TRY(const Parent* parent, OpenParent(parent_path));
  const std::string name(base);
  Result<void> made;
  switch (entry.type) {
    case EntryType::kDirectory:
      made = MakeDirectory(*parent, name, entry);
      break;
    case EntryType::kFile:
      made = MakeFile(*parent, name, entry, source);
      break;
    case EntryType::kHardlink:
      made = MakeHardlink(*parent, name, entry);
      break;
    default:
      made = MakeSpecial(*parent, name, entry);
      break;
  }
  if (made.ok()) touched_.insert(Key(parent->inode, name));
  return made;
}

Result<const Unpacker::Parent*> Unpacker::OpenParent(std::string_view path) {
  if (parent_.fd.valid() && parent_.path == path) return &parent_;
  const std::string text(path.empty() ? "." : path);
  auto fd = os::OpenInRoot(tree_.get(), text.c_str(), O_RDONLY | O_DIRECTORY);
  if (!fd.ok() && (fd.error().sys_errno() == ENOENT || fd.error().sys_errno() == ENOTDIR)) {
    DSEC_TRY_VOID(MakeParents(path));
    fd = os::OpenInRoot(tree_.get(), text.c_str(), O_RDONLY | O_DIRECTORY);
  }
  if (!fd.ok()) {
    errno = fd.error().sys_errno();
    return StoreError("open its folder");
  }
  DSEC_TRY(const uint64_t inode, InodeOf(fd->get()));
  parent_ = Parent{std::string(path), *std::move(fd), inode};
  return &parent_;
}

Result<void> Unpacker::MakeParents(std::string_view path) {
  DSEC_TRY(auto above, os::OpenAt(tree_.get(), ".", O_RDONLY | O_DIRECTORY));
  for (size_t end = 0; end < path.size();) {
    const size_t start = end == 0 ? 0 : end + 1;
    end = std::min(path.find('/', start), path.size());
    const std::string prefix(path.substr(0, end));
    const std::string name(path.substr(start, end - start));
    auto fd = os::OpenInRoot(tree_.get(), prefix.c_str(), O_RDONLY | O_DIRECTORY);
    if (!fd.ok()) {
      struct stat status;
      DSEC_TRY(const bool exists, StatAt(above.get(), name, status));
      const bool whiteout = exists && IsWhiteout(status);
      if (exists && !whiteout) {
        return Refuse(
            "layer.bad_path",
            fmt::format("\"{}\" on its way is not a folder of the layer", Printable(prefix)));
      }
      if (whiteout) DSEC_TRY_VOID(Remove(above.get(), name));
      if (::mkdirat(above.get(), name.c_str(), 0755) != 0) return StoreError("make its folder");
      fd = os::OpenAt(above.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      if (!fd.ok()) return std::move(fd).error();
      if (::fchmod(fd->get(), 0755) != 0) return StoreError("chmod its folder");
      if (whiteout && options_.keep_whiteouts) DSEC_TRY_VOID(MarkOpaque(fd->get()));
      DSEC_TRY(const uint64_t above_inode, InodeOf(above.get()));
      DSEC_TRY(const uint64_t inode, InodeOf(fd->get()));
      touched_.insert(Key(above_inode, name));
      directory_times_[inode] = Time();
    }
    above = *std::move(fd);
  }
  return Ok();
}

Result<void> Unpacker::ApplyWhiteout(std::string_view parent_path, std::string_view target) {
  DSEC_TRY(const Parent* parent, OpenParent(parent_path));
  const std::string name(target);
  const int dirfd = parent->fd.get();
  const uint64_t parent_inode = parent->inode;
  struct stat status;
  DSEC_TRY(bool exists, StatAt(dirfd, name, status));
  const bool touched = Touched(parent_inode, name);
  if (exists && S_ISDIR(status.st_mode)) {
    DSEC_TRY(const auto fd, os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    DSEC_TRY_VOID(RemoveLower(fd.get(), 0));
    if (!touched && ::unlinkat(dirfd, name.c_str(), AT_REMOVEDIR) == 0) {
      exists = false;
    } else if (options_.keep_whiteouts) {
      return MarkOpaque(fd.get());
    }
  } else if (exists && !touched) {
    DSEC_TRY_VOID(Remove(dirfd, name));
    exists = false;
  }
  if (exists || !options_.keep_whiteouts) return Ok();
  if (::mknodat(dirfd, name.c_str(), S_IFCHR, ::makedev(0, 0)) != 0) {
    return StoreError("make a whiteout");
  }
  const std::array<timespec, 2> times = {};
  if (::utimensat(dirfd, name.c_str(), times.data(), AT_SYMLINK_NOFOLLOW) != 0) {
    return StoreError("set the time of a whiteout");
  }
  touched_.insert(Key(parent_inode, name));
  return Ok();
}

Result<void> Unpacker::ApplyOpaque(std::string_view folder) {
  if (folder.empty() && options_.keep_whiteouts) {
    return Refuse("layer.bad_whiteout",
                  "hides everything below the layer; overlayfs has no such layer, use a base");
  }
  DSEC_TRY(const Parent* parent, OpenParent(folder));
  DSEC_TRY_VOID(RemoveLower(parent->fd.get(), 0));
  if (options_.keep_whiteouts) return MarkOpaque(parent->fd.get());
  return Ok();
}

Result<void> Unpacker::RemoveLower(int dirfd, uint64_t depth) {
  // Links may have led deeper than any name was; descriptors and stack are bounded all the same.
  if (depth > options_.limits.max_depth) return Refuse("layer.bad_path", "the tree is too deep");
  DSEC_TRY(const uint64_t inode, InodeOf(dirfd));
  DSEC_TRY(const auto names, ListNames(dirfd, options_.limits.max_entries));
  for (const std::string& name : names) {
    struct stat status;
    DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
    if (!exists) continue;
    const bool directory = S_ISDIR(status.st_mode);
    if (directory) {
      DSEC_TRY(const auto child,
               os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
      DSEC_TRY_VOID(RemoveLower(child.get(), depth + 1));
    }
    if (Touched(inode, name)) continue;
    // A folder that still holds something of this layer stays.
    if (::unlinkat(dirfd, name.c_str(), directory ? AT_REMOVEDIR : 0) != 0 && errno != ENOTEMPTY) {
      return StoreError("remove what a whiteout hides");
    }
  }
  ForgetParent();
  return Ok();
}

Result<void> Unpacker::Remove(int dirfd, const std::string& name) {
  ForgetParent();
  return os::RemoveTree(dirfd, name.c_str());
}

Result<void> Unpacker::MakeDirectory(const Parent& parent, const std::string& name,
                                     const Entry& entry) {
  const int dirfd = parent.fd.get();
  struct stat status;
  DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
  const bool kept = exists && S_ISDIR(status.st_mode);
  if (exists && !kept) DSEC_TRY_VOID(Remove(dirfd, name));
  if (!kept && ::mkdirat(dirfd, name.c_str(), 0700) != 0) return StoreError("make the folder");
  DSEC_TRY(const auto fd, os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (kept) {
    // The upper layer's description replaces the lower one's as a whole.
    std::array<char, XATTR_LIST_MAX> list;
    const ssize_t size = ::flistxattr(fd.get(), list.data(), list.size());
    for (ssize_t start = 0; start < size;) {
      const std::string xattr = list.data() + start;
      start += static_cast<ssize_t>(xattr.size()) + 1;
      if (!xattr.starts_with(kOverlayPrefix)) ::fremovexattr(fd.get(), xattr.c_str());
    }
  } else if (exists && options_.keep_whiteouts) {
    DSEC_TRY_VOID(MarkOpaque(fd.get()));  // what was not a folder hid whatever lies below the layer
  }
  return SetDirectory(fd.get(), entry);
}

Result<void> Unpacker::SetDirectory(int fd, const Entry& entry) {
  if (::fchown(fd, entry.uid, entry.gid) != 0) return StoreError("chown");
  if (::fchmod(fd, entry.mode) != 0) return StoreError("chmod");
  DSEC_TRY_VOID(SetXattrs(fmt::format("/proc/self/fd/{}/.", fd), entry));
  DSEC_TRY(const uint64_t inode, InodeOf(fd));
  directory_times_[inode] = Time{entry.mtime_sec, entry.mtime_nsec};
  return Ok();
}

Result<void> Unpacker::SetXattrs(const std::string& path, const Entry& entry) {
  for (const auto& [name, value] : entry.xattrs) {
    if (name.starts_with(kOverlayPrefix)) {
      warnings_.Add(fmt::format("\"{}\": xattr {} would steer the overlay and is left out",
                                Printable(entry.path), Printable(name)));
      continue;
    }
    if (::lsetxattr(path.c_str(), name.c_str(), value.data(), value.size(), 0) == 0) continue;
    // A name space of another system, or user.* on what is neither file nor folder: see xattr(7).
    if (errno == ENOTSUP || errno == EPERM || errno == EINVAL) {
      warnings_.Add(fmt::format("\"{}\": xattr {} is not one that Linux keeps here and is left out",
                                Printable(entry.path), Printable(name)));
      continue;
    }
    const int sys_errno = errno;
    return Error(Code::kInvalidArgument, "layer.xattr_too_large",
                 fmt::format("xattr {} of {} bytes does not fit the file system of the layer store",
                             Printable(name), value.size()))
        .WithErrno(sys_errno);
  }
  return Ok();
}

Result<void> Unpacker::MakeFile(const Parent& parent, const std::string& name, const Entry& entry,
                                EntrySource& source) {
  const int dirfd = parent.fd.get();
  struct stat status;
  DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
  if (exists) DSEC_TRY_VOID(Remove(dirfd, name));
  const int raw =
      ::openat(dirfd, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (raw < 0) return StoreError("make the file");
  const os::UniqueFd fd(raw);
  uint64_t end = 0;
  while (true) {
    DSEC_TRY(const DataRun run, source.ReadData());
    if (run.bytes.empty()) break;
    if (run.offset < end || run.bytes.size() > entry.size ||
        run.offset > entry.size - run.bytes.size()) {
      return Refuse("layer.malformed", "its data does not fit its size");
    }
    for (size_t done = 0; done < run.bytes.size();) {
      const ssize_t n = ::pwrite(fd.get(), run.bytes.data() + done, run.bytes.size() - done,
                                 static_cast<off_t>(run.offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return StoreError("write the file");
      done += static_cast<size_t>(n);
    }
    end = run.offset + run.bytes.size();
    written_bytes_ += run.bytes.size();
    if (written_bytes_ - checked_bytes_ >= kSpaceCheckBytes) DSEC_TRY_VOID(CheckSpace());
    if (proceed_ && !proceed_()) {
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while unpacking");
    }
  }
  if (end != entry.size && ::ftruncate(fd.get(), static_cast<off_t>(entry.size)) != 0) {
    return StoreError("set the size of the file");
  }
  if (::fchown(fd.get(), entry.uid, entry.gid) != 0) return StoreError("chown");
  if (::fchmod(fd.get(), entry.mode) != 0)
    return StoreError("chmod");                            // after chown, which clears setuid
  DSEC_TRY_VOID(SetXattrs(ProcPath(dirfd, name), entry));  // after chown, which clears capabilities
  const std::array<timespec, 2> times = {timespec{0, UTIME_OMIT},
                                         timespec{entry.mtime_sec, entry.mtime_nsec}};
  if (::futimens(fd.get(), times.data()) != 0) return StoreError("set the time");
  return Ok();
}

Result<void> Unpacker::CheckSpace() {
  checked_bytes_ = written_bytes_;
  // The image will take about as much again, beside the tree.
  return RequireSpace(tree_.get(), written_bytes_, "the image of what is unpacked so far");
}

Result<void> Unpacker::MakeSpecial(const Parent& parent, const std::string& name,
                                   const Entry& entry) {
  const int dirfd = parent.fd.get();
  if (entry.dev_major > kMaxMajor || entry.dev_minor > kMaxMinor) {
    return Refuse("layer.malformed", fmt::format("device {}:{} is no device number",
                                                 entry.dev_major, entry.dev_minor));
  }
  struct stat status;
  DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
  if (exists) DSEC_TRY_VOID(Remove(dirfd, name));
  if (entry.type == EntryType::kSymlink) {
    if (::symlinkat(entry.target.c_str(), dirfd, name.c_str()) != 0) {
      return StoreError("make the link");
    }
  } else {
    const mode_t type = entry.type == EntryType::kCharDevice    ? S_IFCHR
                        : entry.type == EntryType::kBlockDevice ? S_IFBLK
                                                                : S_IFIFO;
    if (::mknodat(dirfd, name.c_str(), type | 0600, ::makedev(entry.dev_major, entry.dev_minor)) !=
        0) {
      return StoreError("make the node");
    }
  }
  if (::fchownat(dirfd, name.c_str(), entry.uid, entry.gid, AT_SYMLINK_NOFOLLOW) != 0) {
    return StoreError("chown");
  }
  if (entry.type != EntryType::kSymlink && ::fchmodat(dirfd, name.c_str(), entry.mode, 0) != 0) {
    return StoreError("chmod");
  }
  DSEC_TRY_VOID(SetXattrs(ProcPath(dirfd, name), entry));
  const std::array<timespec, 2> times = {timespec{0, UTIME_OMIT},
                                         timespec{entry.mtime_sec, entry.mtime_nsec}};
  if (::utimensat(dirfd, name.c_str(), times.data(), AT_SYMLINK_NOFOLLOW) != 0) {
    return StoreError("set the time");
  }
  return Ok();
}

Result<void> Unpacker::MakeHardlink(const Parent& parent, const std::string& name,
                                    const Entry& entry) {
  const auto bad = [&](std::string_view rule) {
    return Refuse("layer.bad_hardlink",
                  fmt::format("hard link to \"{}\": {}", Printable(entry.target), rule));
  };
  auto clean = CleanPath(entry.target, options_.limits.max_depth);
  if (!clean.ok() || clean->empty()) return bad("no path inside the layer");
  const auto [target_parent, target_base] = Split(*clean);
  const std::string folder(target_parent.empty() ? "." : target_parent);
  const std::string target(target_base);
  const auto target_fd = os::OpenInRoot(tree_.get(), folder.c_str(), O_RDONLY | O_DIRECTORY);
  struct stat found;
  if (!target_fd.ok() ||
      ::fstatat(target_fd->get(), target.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) {
    return bad("there is no such member before it");
  }
  if (S_ISDIR(found.st_mode)) return bad("is a folder");
  const int dirfd = parent.fd.get();
  struct stat status;
  DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
  if (exists && status.st_ino == found.st_ino) return Ok();
  if (exists) DSEC_TRY_VOID(Remove(dirfd, name));
  if (::linkat(target_fd->get(), target.c_str(), dirfd, name.c_str(), 0) != 0) {
    if (errno == ENOENT) return bad("the link takes the place of what it leads to");
    if (errno == EMLINK) return bad("has more links than the file system of the store can hold");
    return StoreError("make the hard link");
  }
  return Ok();
}

Result<uint64_t> Unpacker::Finish() {
  parent_ = Parent();
  touched_.clear();
  return FinishDirectory(tree_.get(), 0);
}

Result<uint64_t> Unpacker::FinishDirectory(int dirfd, uint64_t depth) {
  if (depth > options_.limits.max_depth) {
    return Refuse("layer.bad_path",
                  fmt::format("the tree is more than {} deep", options_.limits.max_depth));
  }
  uint64_t entries = 0;
  bool holds_whiteouts = false;
  DSEC_TRY(const auto names, ListNames(dirfd, options_.limits.max_entries));
  for (const std::string& name : names) {
    ++entries;
    struct stat status;
    DSEC_TRY(const bool exists, StatAt(dirfd, name, status));
    holds_whiteouts = holds_whiteouts || (exists && IsWhiteout(status));
    if (!exists || !S_ISDIR(status.st_mode)) continue;
    DSEC_TRY(const auto child,
             os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    DSEC_TRY(const uint64_t below, FinishDirectory(child.get(), depth + 1));
    entries += below;
  }
  if (holds_whiteouts && depth > 0 && ::fsetxattr(dirfd, kOriginXattr, "", 0, 0) != 0) {
    return StoreError("mark a folder with whiteouts");
  }
  DSEC_TRY(const uint64_t inode, InodeOf(dirfd));
  const auto found = directory_times_.find(inode);
  const Time time = found == directory_times_.end() ? Time() : found->second;
  const std::array<timespec, 2> times = {timespec{0, UTIME_OMIT}, timespec{time.sec, time.nsec}};
  if (::futimens(dirfd, times.data()) != 0) return StoreError("set the time of a folder");
  return entries;
}

}  // namespace dsec::image::testing
