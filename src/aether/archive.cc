// SPDX-License-Identifier: Apache-2.0
#include "aether/archive.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "aether/fs_identity.h"
#include "os/file.h"
#include "os/syscalls.h"

namespace dsec::aether {
namespace {

constexpr size_t kPieceBytes = 128 << 10;
constexpr uint64_t kMinSparseSize = 64 << 10;
constexpr int kLookupAttempts = 32;

// Where the file has data; empty when it has no holes, or too many for a map.
std::vector<std::pair<uint64_t, uint64_t>> DataRanges(int fd, uint64_t size) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  off_t position = 0;
  while (static_cast<uint64_t>(position) < size) {
    off_t data = ::lseek(fd, position, SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;
    off_t hole = data < 0 ? -1 : ::lseek(fd, data, SEEK_HOLE);
    if (hole < 0 || ranges.size() >= TarReader::kMaxSparseRanges - 1) return {};
    uint64_t end = std::min(static_cast<uint64_t>(hole), size);
    if (static_cast<uint64_t>(data) < end)
      ranges.emplace_back(data, end - static_cast<uint64_t>(data));
    position = hole;
  }
  // A map is never empty: the end of the file stands for "all of it is a hole".
  if (ranges.empty()) ranges.emplace_back(size, 0);
  return ranges;
}

// The name below the target directory; empty for the directory itself.
Result<std::string> MemberPath(std::string_view path) {
  std::string clean;
  while (!path.empty()) {
    size_t slash = path.find('/');
    std::string_view part = path.substr(0, slash);
    path.remove_prefix(slash == std::string_view::npos ? path.size() : slash + 1);
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      return Error(Code::kInvalidArgument, "archive.bad_path",
                   "a member's name must not contain \"..\"");
    }
    if (!clean.empty()) clean += '/';
    clean += part;
  }
  return clean;
}

}  // namespace

Result<std::unique_ptr<ArchiveWriter>> ArchiveWriter::Open(int root, const std::string& path) {
  DSEC_TRY_VOID(CheckFilePath(path, "path"));
  Result<os::UniqueFd> directory = os::OpenInRoot(root, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!directory.ok()) return FileError(directory.error().sys_errno(), path);
  auto writer = std::make_unique<ArchiveWriter>();
  Level& level = writer->levels_.emplace_back();
  level.directory = std::move(directory).value();
  level.reader = std::make_unique<DirectoryReader>(level.directory.get());
  return writer;
}

Result<std::string> ArchiveWriter::Read(size_t max_bytes) {
  while (pending_.size() < max_bytes && !ended_) {
    if (file_.valid()) {
      AddData(max_bytes);
    } else if (!levels_.empty()) {
      Next();
    } else {
      pending_ += TarEnd();
      ended_ = true;
    }
  }
  return std::exchange(pending_, {});
}

void ArchiveWriter::Next() {
  Level& level = levels_.back();
  Result<std::optional<DirectoryReader::Entry>> entry = level.reader->Next();
  if (!entry.ok()) Warn(level.prefix, entry.error().message());
  if (!entry.ok() || !entry->has_value()) {
    levels_.pop_back();
    return;
  }
  std::string name((*entry)->name);
  if (!IsHiddenName(name)) AddEntry(name);
}

void ArchiveWriter::AddEntry(const std::string& name) {
  int directory = levels_.back().directory.get();
  struct stat status;
  TarEntry entry;
  entry.path = levels_.back().prefix + name;
  if (entry.path.size() >= TarReader::kMaxPath - 1) return Warn(entry.path, "its path is too long");
  if (::fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
    return Warn(entry.path, strerrordesc_np(errno));
  }
  entry.mode = status.st_mode & 07777;
  entry.uid = FromAgentId(status.st_uid);
  entry.gid = FromAgentId(status.st_gid);
  entry.mtime_ns = status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec;
  if (S_ISREG(status.st_mode)) return AddFile(directory, name, status, entry);
  if (S_ISDIR(status.st_mode)) {
    if (levels_.size() >= kMaxDepth) return Warn(entry.path, "it lies too deep");
    Result<os::UniqueFd> child = os::OpenBeneath(directory, name.c_str(), O_RDONLY | O_DIRECTORY);
    if (!child.ok()) {
      bool mount = child.error().sys_errno() == EXDEV;
      return Warn(entry.path, mount ? "something is mounted on it" : child.error().message());
    }
    entry.type = TarEntry::Type::kDirectory;
    entry.path += '/';
    pending_ += TarHeader(entry);
    Level& level = levels_.emplace_back();
    level.directory = std::move(child).value();
    level.reader = std::make_unique<DirectoryReader>(level.directory.get());
    level.prefix = entry.path;
    return;
  }
  if (S_ISLNK(status.st_mode)) {
    char target[PATH_MAX];
    ssize_t size = ::readlinkat(directory, name.c_str(), target, sizeof(target));
    if (size < 0) return Warn(entry.path, strerrordesc_np(errno));
    entry.type = TarEntry::Type::kSymlink;
    entry.link.assign(target, static_cast<size_t>(size));
  } else if (S_ISFIFO(status.st_mode)) {
    entry.type = TarEntry::Type::kFifo;
  } else {
    return Warn(entry.path, "devices and sockets are not archived");
  }
  pending_ += TarHeader(entry);
}

void ArchiveWriter::AddFile(int directory, const std::string& name, const struct stat& status,
                            TarEntry& entry) {
  if (status.st_nlink > 1) {
    auto known = hard_links_.find({status.st_dev, status.st_ino});
    if (known != hard_links_.end()) {
      entry.type = TarEntry::Type::kHardlink;
      entry.link = known->second;
      pending_ += TarHeader(entry);
      return;
    }
    if (hard_links_.size() < kMaxHardLinks)
      hard_links_[{status.st_dev, status.st_ino}] = entry.path;
  }
  Result<os::UniqueFd> file =
      os::OpenAt(directory, name.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_NOCTTY);
  if (!file.ok()) return Warn(entry.path, file.error().message());
  struct stat now;
  if (::fstat(file->get(), &now) != 0 || !S_ISREG(now.st_mode))
    return Warn(entry.path, "it has changed meanwhile");
  entry.size = static_cast<uint64_t>(now.st_size);
  if (entry.size >= kMinSparseSize && static_cast<uint64_t>(now.st_blocks) * 512 < entry.size) {
    entry.map = DataRanges(file->get(), entry.size);
  }
  pending_ += TarHeader(entry);
  if (entry.stored == 0) return;
  if (entry.map.empty()) entry.map.emplace_back(0, entry.size);
  file_ = std::move(file).value();
  file_entry_ = std::move(entry);
  range_ = 0;
  range_done_ = 0;
  shrank_ = false;
}

void ArchiveWriter::AddData(size_t max_bytes) {
  while (range_ < file_entry_.map.size() && pending_.size() < max_bytes) {
    auto [offset, size] = file_entry_.map[range_];
    if (range_done_ == size) {
      ++range_;
      range_done_ = 0;
      continue;
    }
    size_t wanted = static_cast<size_t>(
        std::min<uint64_t>({size - range_done_, max_bytes - pending_.size(), kPieceBytes}));
    size_t start = pending_.size();
    pending_.resize(start + wanted);
    ssize_t got = ::pread(file_.get(), pending_.data() + start, wanted,
                          static_cast<off_t>(offset + range_done_));
    if (got <= 0) {  // the header has promised this many bytes
      if (!std::exchange(shrank_, true)) {
        Warn(file_entry_.path,
             got < 0 ? "it could not be read to its end" : "it shrank while it was read");
      }
      got = static_cast<ssize_t>(wanted);
    }
    pending_.resize(start + static_cast<size_t>(got));
    range_done_ += static_cast<uint64_t>(got);
  }
  if (range_ < file_entry_.map.size()) return;
  pending_.append(TarPadding(file_entry_.stored), '\0');
  file_.Reset();
}

void ArchiveWriter::Warn(std::string_view path, std::string_view why) {
  ++warned_;
  if (warned_ < kMaxWarnings) {
    warnings_.push_back(fmt::format("{}: {}", path.substr(0, 512), why));
  } else if (warned_ == kMaxWarnings) {
    warnings_.push_back("more entries are left out or incomplete");
  }
}

Result<std::unique_ptr<ArchiveReader>> ArchiveReader::Open(int root, const std::string& path,
                                                           const Identity& owner) {
  DSEC_TRY_VOID(CheckFilePath(path, "path"));
  DSEC_TRY_VOID(MakeParents(root, path, owner));
  Result<os::UniqueFd> target = os::OpenInRoot(root, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!target.ok()) return FileError(target.error().sys_errno(), path);
  struct stat top, here;
  if (::fstat(root, &top) != 0 || ::fstat(target->get(), &here) != 0) return FileError(errno, path);
  bool is_root = top.st_dev == here.st_dev && top.st_ino == here.st_ino;
  uint64_t resolve = RESOLVE_NO_MAGICLINKS | (is_root ? RESOLVE_IN_ROOT : RESOLVE_BENEATH);
  return std::unique_ptr<ArchiveReader>(
      new ArchiveReader(std::move(target).value(), owner, resolve));
}

Result<void> ArchiveReader::Feed(std::string_view data) { return reader_.Feed(data); }

Result<os::UniqueFd> ArchiveReader::OpenIn(const std::string& path, int flags) const {
  const char* name = path.empty() ? "." : path.c_str();
  int fd = -1;
  for (int attempt = 0; attempt < kLookupAttempts; ++attempt) {
    fd = os::OpenAt2(target_.get(), name, static_cast<uint64_t>(flags | O_CLOEXEC), 0, resolve_);
    if (fd >= 0 || (errno != EAGAIN && errno != EINTR)) break;
  }
  if (fd >= 0) return os::UniqueFd(fd);
  if (errno == EXDEV) {
    return Error(Code::kInvalidArgument, "archive.outside",
                 "a link leads out of the target directory")
        .WithErrno(EXDEV);
  }
  return FileError(errno, path);
}

Result<os::UniqueFd> ArchiveReader::OpenParent(const std::string& path) {
  auto above = [](const std::string& name) {
    size_t slash = name.rfind('/');
    return slash == std::string::npos ? std::string() : name.substr(0, slash);
  };
  std::vector<std::string> missing;
  std::string parent = above(path);
  Result<os::UniqueFd> found = OpenIn(parent, O_RDONLY | O_DIRECTORY);
  while (!found.ok() && found.error().sys_errno() == ENOENT && !parent.empty()) {
    missing.push_back(parent);
    parent = above(parent);
    found = OpenIn(parent, O_RDONLY | O_DIRECTORY);
  }
  while (found.ok() && !missing.empty()) {
    std::string name = missing.back().substr(missing.back().rfind('/') + 1);
    if (::mkdirat(found->get(), name.c_str(), 0755) != 0 && errno != EEXIST)
      return FileError(errno, missing.back());
    found = OpenIn(missing.back(), O_RDONLY | O_DIRECTORY);
    missing.pop_back();
  }
  return found;
}

template <typename Make>
Result<void> ArchiveReader::Replace(int parent, const std::string& name, Make make) {
  if (make()) return Ok();
  if (errno != EEXIST) return FileError(errno, name);
  if (::unlinkat(parent, name.c_str(), 0) != 0 && errno != ENOENT) return FileError(errno, name);
  if (!make()) return FileError(errno, name);
  return Ok();
}

Result<void> ArchiveReader::MakeDirectory(int parent, const std::string& name, uint32_t mode) {
  if (::mkdirat(parent, name.c_str(), mode & 01777) == 0) return Ok();
  if (errno != EEXIST) return FileError(errno, name);
  struct stat status;
  if (::fstatat(parent, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0)
    return FileError(errno, name);
  // A link to a directory is left as it is: what is below it is resolved like anything else.
  if (!S_ISDIR(status.st_mode) && !S_ISLNK(status.st_mode)) return FileError(ENOTDIR, name);
  return Ok();
}

Result<void> ArchiveReader::MakeHardLink(int parent, const std::string& name,
                                         const std::string& target) {
  DSEC_TRY(std::string path, MemberPath(target));
  DSEC_TRY(os::UniqueFd file, OpenIn(path, O_PATH | O_NOFOLLOW));
  struct stat status, present;
  if (::fstat(file.get(), &status) != 0) return FileError(errno, path);
  if (!S_ISREG(status.st_mode)) return FileError(ENXIO, path);
  if (::fstatat(parent, name.c_str(), &present, AT_SYMLINK_NOFOLLOW) == 0 &&
      present.st_ino == status.st_ino && present.st_dev == status.st_dev) {
    return Ok();
  }
  std::string self = fmt::format("/proc/self/fd/{}", file.get());
  return Replace(parent, name, [&] {
    return ::linkat(AT_FDCWD, self.c_str(), parent, name.c_str(), AT_SYMLINK_FOLLOW) == 0;
  });
}

Result<void> ArchiveReader::OnEntry(const TarEntry& entry) {
  entry_ = entry;
  ++entries_;
  DSEC_TRY(std::string path, MemberPath(entry.path));
  if (path.empty() || entry.type == TarEntry::Type::kOther) return Ok();
  if (entry.type == TarEntry::Type::kDevice) {
    return Error(Code::kInvalidArgument, "archive.device", "the archive holds a device");
  }
  std::string name = path.substr(path.rfind('/') + 1);
  if (name.size() > NAME_MAX) return FileError(ENAMETOOLONG, path);
  ScopedFsIdentity as(owner_.uid, owner_.gid);
  DSEC_TRY(os::UniqueFd parent, OpenParent(path));
  switch (entry.type) {
    case TarEntry::Type::kDirectory:
      return MakeDirectory(parent.get(), name, entry.mode);
    case TarEntry::Type::kSymlink:
      return Replace(parent.get(), name, [&] {
        return ::symlinkat(entry.link.c_str(), parent.get(), name.c_str()) == 0;
      });
    case TarEntry::Type::kHardlink:
      return MakeHardLink(parent.get(), name, entry.link);
    case TarEntry::Type::kFifo:
      return Replace(parent.get(), name, [&] {
        return ::mkfifoat(parent.get(), name.c_str(), entry.mode & 01777) == 0;
      });
    default: {
      DSEC_TRY(NewFile file, NewFile::Create(std::move(parent), name, owner_));
      file_ = std::move(file);
      return Ok();
    }
  }
}

Result<void> ArchiveReader::OnData(uint64_t offset, std::string_view data) {
  bytes_ += data.size();
  if (!file_) return Ok();
  DSEC_TRY_VOID(file_->Extend(offset));
  return file_->Write(data);
}

Result<void> ArchiveReader::OnEntryEnd() {
  if (!file_) return Ok();
  NewFile file = std::move(*file_);
  file_.reset();
  DSEC_TRY_VOID(file.Extend(entry_.size));
  int64_t seconds = entry_.mtime_ns / 1'000'000'000;
  const timespec times[2] = {{0, UTIME_OMIT}, {seconds, entry_.mtime_ns - seconds * 1'000'000'000}};
  if (entry_.mtime_ns >= 0 && ::futimens(file.fd(), times) != 0)
    return FileError(errno, entry_.path);
  return file.Commit(entry_.mode & 01777, NewFile::Existing::kReplace);
}

}  // namespace dsec::aether
