// SPDX-License-Identifier: Apache-2.0
#include "image/dir_source.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <map>
#include <memory>

#include "image/fs.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::image {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

Error Refuse(std::string_view reason, std::string_view path, std::string_view rule) {
  return Error(Code::kInvalidArgument, reason, fmt::format("\"{}\": {}", Printable(path), rule));
}

// All extended attributes of `name` below `dirfd`, of a link itself.
Result<std::vector<std::pair<std::string, std::string>>> ReadXattrs(int dirfd,
                                                                    const std::string& name) {
  const std::string path = fmt::format("/proc/self/fd/{}/{}", dirfd, name);
  std::vector<std::pair<std::string, std::string>> found;
  std::array<char, XATTR_LIST_MAX> names;
  const ssize_t size = ::llistxattr(path.c_str(), names.data(), names.size());
  if (size == 0 || (size < 0 && errno == ENOTSUP)) return found;
  if (size < 0) return os::ErrnoError("layer.source", "list extended attributes");
  std::string value(XATTR_SIZE_MAX, '\0');
  for (size_t start = 0; start < static_cast<size_t>(size);) {
    const std::string xattr = names.data() + start;
    start += xattr.size() + 1;
    const ssize_t length = ::lgetxattr(path.c_str(), xattr.c_str(), value.data(), value.size());
    if (length < 0 && errno == ENODATA) continue;
    if (length < 0) {
      return os::ErrnoError("layer.source", fmt::format("read xattr {}", Printable(xattr)));
    }
    found.emplace_back(xattr, value.substr(0, static_cast<size_t>(length)));
  }
  return found;
}

struct Folder {
  os::UniqueFd fd;
  std::string path;  // "" for the root, else with a trailing "/"
  std::vector<std::string> names;
  size_t next = 0;
};

// What is different in a layer of an overlay.
struct OverlayView {
  IdRange ids;
  PackFilter* filter;  // may be null
};

class DirSource : public EntrySource {
 public:
  // `overlay`: null for a folder that is no layer of an overlay; outlives this object.
  DirSource(os::UniqueFd root, const OverlayView* overlay, const ImportLimits& limits,
            Warnings& warnings)
      : root_(std::move(root)),
        overlay_(overlay),
        limits_(limits),
        warnings_(warnings),
        buffer_(kBufferBytes) {}

  Result<bool> Next(Entry& entry) override {
    file_.Reset();
    if (!started_) {
      started_ = true;
      struct statx status;
      DSEC_TRY_VOID(Stat(root_.get(), "", status));
      mount_ = status.stx_mnt_id;
      DSEC_TRY_VOID(Fill(root_.get(), ".", status, entry));
      if (entry.opaque) {
        return Refuse("layer.bad_whiteout", "", "the root of a layer cannot be opaque");
      }
      entry.path = "";
      DSEC_TRY_VOID(Push(std::move(root_), ""));
      return true;
    }
    while (!stack_.empty()) {
      Folder& top = stack_.back();
      if (top.next == top.names.size()) {
        stack_.pop_back();
        continue;
      }
      const std::string name = top.names[top.next++];
      const std::string path = top.path + name;
      auto taken = Visit(top.fd.get(), name, path, entry);
      if (!taken.ok()) {
        return std::move(taken).error().Context("source member \"{}\"", Printable(path));
      }
      if (*taken) return true;
    }
    return false;
  }

  Result<DataRun> ReadData() override {
    if (!file_.valid()) return DataRun();
    if (offset_ >= size_) return End();
    const off_t data = ::lseek(file_.get(), static_cast<off_t>(offset_), SEEK_DATA);
    if (data < 0 && errno == ENXIO) return End();          // only a hole is left
    if (data >= 0) offset_ = static_cast<uint64_t>(data);  // EINVAL: no support for holes
    if (offset_ >= size_) return End();
    const off_t hole = ::lseek(file_.get(), static_cast<off_t>(offset_), SEEK_HOLE);
    const uint64_t end = hole < 0 ? size_ : std::min<uint64_t>(static_cast<uint64_t>(hole), size_);
    const size_t want = std::min<uint64_t>(buffer_.size(), end - offset_);
    ssize_t n;
    do {
      n = ::pread(file_.get(), buffer_.data(), want, static_cast<off_t>(offset_));
    } while (n < 0 && errno == EINTR);
    if (n < 0) {
      return os::ErrnoError("layer.source", fmt::format("read \"{}\"", Printable(path_)));
    }
    if (n == 0) return Changed();
    const DataRun run{offset_, {buffer_.data(), static_cast<size_t>(n)}};
    if (PackFilter* const filter = Filter()) {
      DSEC_TRY_VOID(filter->CheckContent(
          {reinterpret_cast<const char*>(buffer_.data()), static_cast<size_t>(n)},
          offset_ == checked_));
      checked_ = offset_ + static_cast<uint64_t>(n);
    }
    offset_ += static_cast<uint64_t>(n);
    return run;
  }

 private:
  Error Changed() const {
    return Refuse("layer.source_changed", path_, "changed while it was read");
  }

  Result<DataRun> End() {
    struct stat status;
    if (::fstat(file_.get(), &status) != 0) return os::ErrnoError("layer.source", "stat a file");
    if (!Same(status)) return Changed();
    return DataRun();
  }

  bool Same(const struct stat& status) const {
    return status.st_ino == status_.stx_ino &&
           static_cast<uint64_t>(status.st_size) == status_.stx_size &&
           status.st_mtim.tv_sec == status_.stx_mtime.tv_sec &&
           static_cast<uint64_t>(status.st_mtim.tv_nsec) == status_.stx_mtime.tv_nsec;
  }

  static Result<void> Stat(int dirfd, const char* name, struct statx& out) {
    if (::statx(dirfd, name, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_MNT_ID,
                &out) != 0) {
      return os::ErrnoError("layer.source", "stat");
    }
    return Ok();
  }

  Result<void> Push(os::UniqueFd fd, std::string path) {
    if (stack_.size() > limits_.max_depth) {
      return Refuse("layer.bad_path", path, fmt::format("more than {} deep", limits_.max_depth));
    }
    DSEC_TRY(auto names, ListNames(fd.get(), limits_.max_entries));
    stack_.push_back(Folder{std::move(fd), std::move(path), std::move(names)});
    return Ok();
  }

  // False when the member is left out.
  Result<bool> Visit(int dirfd, const std::string& name, const std::string& path, Entry& entry) {
    struct statx status;
    DSEC_TRY_VOID(Stat(dirfd, name.c_str(), status));
    if (status.stx_mnt_id != mount_) {
      return Refuse("layer.source_crosses_mount", path, "is a mount point; unmount it first");
    }
    PackFilter* const filter = Filter();
    if (filter != nullptr) {
      if (filter->Scrub(path)) return false;
      DSEC_TRY_VOID(filter->CheckPath(path));
    }
    if (overlay_ != nullptr && IsWhiteoutDevice(status)) {
      entry = Whiteout(path);
      return true;
    }
    if (S_ISSOCK(status.stx_mode)) {
      warnings_.Add(fmt::format("\"{}\": sockets are left out", Printable(path)));
      return false;
    }
    DSEC_TRY_VOID(Fill(dirfd, name, status, entry));
    entry.path = path;
    if (filter != nullptr) {
      filter->BeginContent(path);
      DSEC_TRY_VOID(filter->CheckContent(entry.target, false));
      for (const auto& [xattr, value] : entry.xattrs) {
        DSEC_TRY_VOID(filter->CheckContent(value, false));
      }
      filter->BeginContent(path);
    }
    if (entry.type == EntryType::kDirectory) {
      DSEC_TRY(auto fd, os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
      DSEC_TRY_VOID(Push(std::move(fd), path + "/"));
      return true;
    }
    if (marks_.whiteout && entry.type == EntryType::kFile && entry.size == 0) {
      entry = Whiteout(path);
      return true;
    }
    if (status.stx_nlink > 1) {
      const std::array<uint64_t, 3> key = {status.stx_dev_major, status.stx_dev_minor,
                                           status.stx_ino};
      const auto [first, inserted] = links_.try_emplace(key, path);
      if (!inserted) {
        entry.type = EntryType::kHardlink;
        entry.target = first->second;
        return true;
      }
    }
    if (entry.type != EntryType::kFile) return true;
    DSEC_TRY(file_, os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    struct stat opened;
    if (::fstat(file_.get(), &opened) != 0) return os::ErrnoError("layer.source", "stat a file");
    path_ = path;
    size_ = entry.size;
    offset_ = 0;
    checked_ = 0;
    status_ = status;
    if (!Same(opened)) return Changed();
    return true;
  }

  PackFilter* Filter() const { return overlay_ == nullptr ? nullptr : overlay_->filter; }

  static bool IsWhiteoutDevice(const struct statx& status) {
    return S_ISCHR(status.stx_mode) && status.stx_rdev_major == 0 && status.stx_rdev_minor == 0;
  }

  // Overlayfs gives many names one device, and when and whose it is tells nothing of the tree.
  static Entry Whiteout(const std::string& path) {
    Entry entry;
    entry.path = path;
    entry.type = EntryType::kCharDevice;
    return entry;
  }

  Result<void> Fill(int dirfd, const std::string& name, const struct statx& status, Entry& entry) {
    entry = Entry();
    switch (status.stx_mode & S_IFMT) {
      case S_IFREG:
        entry.type = EntryType::kFile;
        entry.size = status.stx_size;
        break;
      case S_IFDIR:
        entry.type = EntryType::kDirectory;
        break;
      case S_IFLNK: {
        entry.type = EntryType::kSymlink;
        std::string target(PATH_MAX, '\0');
        const ssize_t n = ::readlinkat(dirfd, name.c_str(), target.data(), target.size());
        if (n < 0) return os::ErrnoError("layer.source", "read a link");
        entry.target = target.substr(0, static_cast<size_t>(n));
        break;
      }
      case S_IFCHR:
        entry.type = EntryType::kCharDevice;
        break;
      case S_IFBLK:
        entry.type = EntryType::kBlockDevice;
        break;
      default:
        entry.type = EntryType::kFifo;
        break;
    }
    entry.mode = status.stx_mode & 07777U;
    entry.uid = status.stx_uid;
    entry.gid = status.stx_gid;
    entry.mtime_sec = status.stx_mtime.tv_sec;
    entry.mtime_nsec = status.stx_mtime.tv_nsec;
    entry.dev_major = status.stx_rdev_major;
    entry.dev_minor = status.stx_rdev_minor;
    DSEC_TRY(entry.xattrs, ReadXattrs(dirfd, name));
    if (overlay_ == nullptr) return Ok();
    DSEC_TRY(marks_, TakeOverlayXattrs(entry.xattrs));
    entry.opaque = marks_.opaque && entry.type == EntryType::kDirectory;
    if (overlay_->ids.whole()) return Ok();
    DSEC_TRY(entry.uid, IdInLayer(entry.uid, overlay_->ids));
    DSEC_TRY(entry.gid, IdInLayer(entry.gid, overlay_->ids));
    return MapXattrIds(entry.xattrs, overlay_->ids);
  }

  os::UniqueFd root_;
  const OverlayView* overlay_;
  OverlayMarks marks_;  // of the present entry
  ImportLimits limits_;
  Warnings& warnings_;
  bool started_ = false;
  uint64_t mount_ = 0;
  std::vector<Folder> stack_;
  std::map<std::array<uint64_t, 3>, std::string> links_;  // device and inode -> first path
  os::UniqueFd file_;
  std::string path_;
  struct statx status_ = {};
  uint64_t size_ = 0;
  uint64_t offset_ = 0;
  uint64_t checked_ = 0;  // end of the run that the filter saw last
  std::vector<uint8_t> buffer_;
};

// Space in use below `dirfd`, an estimate: what cannot be read is met again, with its name, by the
// import.
uint64_t BytesBelow(int dirfd, uint64_t depth_left) {
  auto names = ListNames(dirfd, std::numeric_limits<uint64_t>::max());
  if (!names.ok()) return 0;
  uint64_t total = 0;
  for (const std::string& name : *names) {
    struct stat status;
    if (::fstatat(dirfd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (S_ISREG(status.st_mode)) {
      const uint64_t size = static_cast<uint64_t>(status.st_size);
      const uint64_t blocks = static_cast<uint64_t>(status.st_blocks) * 512;
      total += std::min(size, blocks) / std::max<uint64_t>(status.st_nlink, 1);
    } else if (S_ISDIR(status.st_mode) && depth_left > 0) {
      auto child = os::OpenAt(dirfd, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      if (child.ok()) total += BytesBelow(child->get(), depth_left - 1);
    }
  }
  return total;
}

class DirImage : public ImageReader {
 public:
  DirImage(os::UniqueFd root, uint64_t bytes, const ImportLimits& limits, Warnings& warnings)
      : root_(std::move(root)), bytes_(bytes), limits_(limits), warnings_(warnings) {}

  size_t layer_count() const override { return 1; }
  uint64_t least_bytes() const override { return bytes_; }
  bool has_whiteouts() const override { return false; }

  Result<std::unique_ptr<EntrySource>> OpenLayer(size_t) override {
    DSEC_TRY(auto fd, os::OpenAt(root_.get(), ".", O_RDONLY | O_DIRECTORY));
    return std::unique_ptr<EntrySource>(
        std::make_unique<DirSource>(std::move(fd), nullptr, limits_, warnings_));
  }

 private:
  os::UniqueFd root_;
  uint64_t bytes_;
  ImportLimits limits_;
  Warnings& warnings_;
};

class OverlayImage : public ImageReader {
 public:
  OverlayImage(OverlayFolders stack, const ImportLimits& limits, Warnings& warnings)
      : folders_(std::move(stack.folders)),
        view_{stack.ids, stack.filter},
        limits_(limits),
        warnings_(warnings) {
    config_ = std::move(stack.config);
  }

  size_t layer_count() const override { return folders_.size(); }
  // A walk to learn it would cost as much as the files themselves.
  uint64_t least_bytes() const override { return 0; }
  bool has_whiteouts() const override { return false; }

  Result<std::unique_ptr<EntrySource>> OpenLayer(size_t index) override {
    DSEC_TRY(auto fd, os::OpenAt(folders_[index].get(), ".", O_RDONLY | O_DIRECTORY));
    return std::unique_ptr<EntrySource>(
        std::make_unique<DirSource>(std::move(fd), &view_, limits_, warnings_));
  }

 private:
  std::vector<os::UniqueFd> folders_;
  const OverlayView view_;
  ImportLimits limits_;
  Warnings& warnings_;
};

}  // namespace

Result<std::unique_ptr<ImageReader>> OpenOverlayFolders(OverlayFolders stack,
                                                        const ImportLimits& limits,
                                                        Warnings& warnings) {
  return std::unique_ptr<ImageReader>(
      std::make_unique<OverlayImage>(std::move(stack), limits, warnings));
}

Result<std::unique_ptr<ImageReader>> OpenDirectory(const std::string& path,
                                                   const ImportLimits& limits, Warnings& warnings) {
  auto root = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!root.ok()) {
    return Error(Code::kInvalidArgument, "layer.source",
                 fmt::format("cannot open folder {}: {}", path, root.error().message()))
        .WithErrno(root.error().sys_errno())
        .WithField("source");
  }
  const uint64_t bytes = BytesBelow(root->get(), limits.max_depth);
  return std::unique_ptr<ImageReader>(
      std::make_unique<DirImage>(*std::move(root), bytes, limits, warnings));
}

}  // namespace dsec::image
