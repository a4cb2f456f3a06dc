// SPDX-License-Identifier: Apache-2.0
#include "aether/files.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <vector>

#include "aether/copy_tree.h"
#include "aether/directory.h"
#include "aether/fs_identity.h"
#include "base/rng.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

constexpr size_t kMaxListBytes = 2 << 20;

std::string_view TypeName(mode_t mode) {
  switch (mode & S_IFMT) {
    case S_IFREG:
      return "file";
    case S_IFDIR:
      return "dir";
    case S_IFLNK:
      return "symlink";
    case S_IFIFO:
      return "fifo";
    case S_IFSOCK:
      return "socket";
    case S_IFCHR:
      return "char";
    default:
      return "block";
  }
}

Result<os::UniqueFd> Open(int root, const std::string& path, int flags) {
  Result<os::UniqueFd> file = os::OpenInRoot(root, path.c_str(), flags);
  if (!file.ok()) return FileError(file.error().sys_errno(), path);
  return file;
}

std::string_view Base(std::string_view path) {
  while (path.size() > 1 && path.ends_with('/')) path.remove_suffix(1);
  size_t slash = path.rfind('/');
  return path.substr(slash + 1);
}

std::string Parent(std::string_view path) {
  while (path.size() > 1 && path.ends_with('/')) path.remove_suffix(1);
  size_t slash = path.rfind('/');
  return slash == 0 || slash == std::string_view::npos ? "/" : std::string(path.substr(0, slash));
}

std::string ReadLink(int dirfd, const char* name) {
  char target[PATH_MAX];
  ssize_t size = ::readlinkat(dirfd, name, target, sizeof(target));
  return size < 0 ? std::string() : std::string(target, static_cast<size_t>(size));
}

uint64_t HiddenNonce() {
  static const uint64_t kNonce = Rng::FromSystem().Next();
  return kNonce;
}

const std::string& HiddenPrefix() {
  static const std::string kPrefix = fmt::format(".dsec-{:016x}-", HiddenNonce());
  return kPrefix;
}

}  // namespace

Error FileError(int sys_errno, std::string_view path) {
  struct Known {
    int sys_errno;
    Code code;
    std::string_view reason;
  };
  static constexpr Known kKnown[] = {
      {ENOENT, Code::kNotFound, "file.not_found"},
      {EEXIST, Code::kAlreadyExists, "file.exists"},
      {ENOTDIR, Code::kInvalidArgument, "file.not_a_directory"},
      {EISDIR, Code::kInvalidArgument, "file.is_a_directory"},
      {ENOTEMPTY, Code::kConflict, "file.not_empty"},
      {ENAMETOOLONG, Code::kInvalidArgument, "file.name_too_long"},
      {ELOOP, Code::kInvalidArgument, "file.too_many_links"},
      {ENOSPC, Code::kResourceExhausted, "file.no_space"},
      {EDQUOT, Code::kResourceExhausted, "file.no_space"},
      {EFBIG, Code::kInvalidArgument, "file.too_large"},
      {EROFS, Code::kPermissionDenied, "file.read_only"},
      {EACCES, Code::kPermissionDenied, "file.denied"},
      {EPERM, Code::kPermissionDenied, "file.denied"},
      {EBUSY, Code::kConflict, "file.busy"},
      {ETXTBSY, Code::kConflict, "file.busy"},
      {EXDEV, Code::kConflict, "file.cross_device"},
      {EINVAL, Code::kInvalidArgument, "file.invalid"},
      {EMFILE, Code::kResourceExhausted, "file.too_many_open"},
      {ENFILE, Code::kResourceExhausted, "file.too_many_open"},
      {ENOMEM, Code::kResourceExhausted, "file.no_memory"},
      {EOPNOTSUPP, Code::kInvalidArgument, "file.unsupported"},
      {ENXIO, Code::kInvalidArgument, "file.not_regular"},
      {EWOULDBLOCK, Code::kConflict, "file.busy"},
  };
  const char* text = strerrordesc_np(sys_errno);
  // A name may hold anything; what is shown of it must not forge a line of a log.
  std::string shown;
  for (char byte : path.substr(0, 256)) shown += byte >= ' ' && byte != 0x7f ? byte : '?';
  std::string message = fmt::format("{}: {}", shown, text != nullptr ? text : "unknown error");
  for (const Known& known : kKnown) {
    if (known.sys_errno == sys_errno) {
      return Error(known.code, known.reason, std::move(message)).WithErrno(sys_errno);
    }
  }
  return Error(Code::kUnavailable, "file.io", std::move(message)).WithErrno(sys_errno);
}

Result<void> CheckFilePath(std::string_view path, std::string_view field) {
  if (path.starts_with('/') && path.size() < PATH_MAX && path.find('\0') == std::string_view::npos)
    return Ok();
  return Error(Code::kInvalidArgument,
               path.size() < PATH_MAX ? "file.bad_path" : "file.name_too_long",
               fmt::format("{} must be absolute, hold no NUL and be shorter than {} bytes", field,
                           PATH_MAX))
      .WithField(std::string(field));
}

bool IsHiddenName(std::string_view name) { return name.starts_with(HiddenPrefix()); }

std::string NewHiddenName() {
  static std::atomic<uint64_t> next{1};
  return fmt::format("{}{}", HiddenPrefix(), next.fetch_add(1));
}

Result<os::UniqueFd> OpenRegular(int root, const std::string& path) {
  // Looked at first: opening a FIFO or a device has effects of its own. What changes in between is
  // caught by the second look, and O_NONBLOCK keeps the open itself from blocking.
  DSEC_TRY(os::UniqueFd place, Open(root, path, O_PATH));
  struct stat status;
  auto check = [&](int fd) -> Result<void> {
    if (::fstat(fd, &status) != 0) return FileError(errno, path);
    if (S_ISREG(status.st_mode)) return Ok();
    if (S_ISDIR(status.st_mode)) return FileError(EISDIR, path);
    return Error(
        Code::kInvalidArgument, "file.not_regular",
        fmt::format("a {} has no content to read or write here", TypeName(status.st_mode)));
  };
  DSEC_TRY_VOID(check(place.get()));
  DSEC_TRY(os::UniqueFd file, Open(root, path, O_RDONLY | O_NONBLOCK | O_NOCTTY));
  DSEC_TRY_VOID(check(file.get()));
  return file;
}

Result<Identity> LookUpIdentity(int root, const std::string& user) {
  if (IsPlainRoot(user)) return Identity();
  auto read = [root](const char* path) {
    Result<os::UniqueFd> file = OpenRegular(root, path);
    if (!file.ok()) return std::string();
    Result<std::string> text = os::ReadAll(file->get(), kMaxAccountFile);
    return text.ok() ? std::move(text).value() : std::string();
  };
  return ResolveIdentity(user, read("/etc/passwd"), read("/etc/group"));
}

Result<Place> FindPlace(int root, const std::string& path) {
  Place place;
  place.name = Base(path);
  if (place.name.empty() || place.name == "." || place.name == "..") {
    return Error(Code::kInvalidArgument, "file.bad_path", "the path must end in a name")
        .WithField("path");
  }
  if (place.name.size() > NAME_MAX) return FileError(ENAMETOOLONG, path);
  DSEC_TRY(place.directory, Open(root, Parent(path), O_RDONLY | O_DIRECTORY));
  return place;
}

Result<void> MakeParents(int root, const std::string& directory, const Identity& owner) {
  // From the deepest that exists downwards.
  std::vector<std::string> missing;
  std::string path = directory;
  while (true) {
    Result<os::UniqueFd> found = os::OpenInRoot(root, path.c_str(), O_PATH | O_DIRECTORY);
    if (found.ok()) break;
    if (found.error().sys_errno() != ENOENT || path == "/")
      return FileError(found.error().sys_errno(), path);
    missing.push_back(path);
    path = Parent(path);
  }
  ScopedFsIdentity as(owner.uid, owner.gid);
  while (!missing.empty()) {
    std::string_view name = Base(missing.back());
    if (name != "." && name != "..") {
      DSEC_TRY(Place place, FindPlace(root, missing.back()));
      if (::mkdirat(place.directory.get(), place.name.c_str(), 0755) != 0 && errno != EEXIST) {
        return FileError(errno, missing.back());
      }
    }
    missing.pop_back();
  }
  return Ok();
}

v1::FileInfo InfoOf(std::string_view name, const struct stat& status) {
  v1::FileInfo info;
  info.set_name(std::string(name));
  info.set_type(std::string(TypeName(status.st_mode)));
  info.set_mode(status.st_mode & 07777);
  info.set_uid(FromAgentId(status.st_uid));
  info.set_gid(FromAgentId(status.st_gid));
  info.set_size(static_cast<uint64_t>(status.st_size));
  info.set_mtime_ns(status.st_mtim.tv_sec * 1'000'000'000 + status.st_mtim.tv_nsec);
  info.set_inode(status.st_ino);
  info.set_nlink(status.st_nlink);
  info.set_blocks_bytes(static_cast<uint64_t>(status.st_blocks) * 512);
  return info;
}

Result<v1::FileInfo> Stat(int root, const v1::PathRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  DSEC_TRY(os::UniqueFd file,
           Open(root, request.path(), O_PATH | (request.follow() ? 0 : O_NOFOLLOW)));
  struct stat status;
  if (::fstat(file.get(), &status) != 0) return FileError(errno, request.path());
  v1::FileInfo info = InfoOf(Base(request.path()), status);
  if (S_ISLNK(status.st_mode)) info.set_target(ReadLink(file.get(), ""));
  return info;
}

Result<v1::ListReply> List(int root, const v1::ListRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  size_t page =
      request.page_size() == 0 ? 1000 : std::min<size_t>(request.page_size(), kMaxPageEntries);
  DSEC_TRY(os::UniqueFd directory, Open(root, request.path(), O_RDONLY | O_DIRECTORY));
  // The smallest names after `after`, in a heap with the largest on top: memory is that of a page,
  // however many there are.
  std::vector<std::string> names;
  DirectoryReader reader(directory.get());
  while (true) {
    DSEC_TRY(std::optional<DirectoryReader::Entry> entry, reader.Next());
    if (!entry) break;
    std::string_view name = entry->name;
    if (name <= request.after() || IsHiddenName(name)) continue;
    if (names.size() == page + 1) {
      if (name >= names.front()) continue;
      std::ranges::pop_heap(names);
      names.pop_back();
    }
    names.emplace_back(name);
    std::ranges::push_heap(names);
  }
  std::ranges::sort(names);
  v1::ListReply reply;
  size_t bytes = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == page || bytes > kMaxListBytes) {
      reply.set_next_after(names[i - 1]);
      break;
    }
    struct stat status;
    if (::fstatat(directory.get(), names[i].c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // removed meanwhile
      return FileError(errno, names[i]);
    }
    v1::FileInfo& info = *reply.add_entries();
    info = InfoOf(names[i], status);
    if (S_ISLNK(status.st_mode)) info.set_target(ReadLink(directory.get(), names[i].c_str()));
    bytes += names[i].size() + info.target().size() + 128;
  }
  return reply;
}

Result<v1::ReadReply> Read(int root, const v1::ReadRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  DSEC_TRY(os::UniqueFd file, OpenRegular(root, request.path()));
  struct stat status;
  if (::fstat(file.get(), &status) != 0) return FileError(errno, request.path());
  uint64_t size = static_cast<uint64_t>(status.st_size);
  uint64_t offset = request.offset();
  if (request.from_end()) offset = size - std::min(size, offset);
  if (offset > INT64_MAX) {
    return Error(Code::kInvalidArgument, "file.invalid", "offset is out of range")
        .WithField("offset");
  }
  size_t length = static_cast<size_t>(std::min<uint64_t>(request.length(), kMaxReadBytes));
  v1::ReadReply reply;
  std::string& data = *reply.mutable_data();
  // What the file claims to hold; some of /proc claim nothing and hold something.
  data.resize(size > offset ? static_cast<size_t>(std::min<uint64_t>(length, size - offset))
                            : length);
  size_t got = 0;
  while (got < data.size()) {
    ssize_t part =
        ::pread(file.get(), data.data() + got, data.size() - got, static_cast<off_t>(offset + got));
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return FileError(errno, request.path());
    if (part == 0) break;
    got += static_cast<size_t>(part);
  }
  bool ended = got < data.size();
  data.resize(got);
  reply.set_size(size);
  reply.set_eof(ended || offset + got >= size);
  *reply.mutable_info() = InfoOf(Base(request.path()), status);
  return reply;
}

Result<v1::Empty> Mkdir(int root, const v1::MkdirRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  DSEC_TRY(Identity owner, LookUpIdentity(root, request.user()));
  mode_t mode = request.mode() == 0 ? 0755 : request.mode();
  if (mode > 07777)
    return Error(Code::kInvalidArgument, "file.bad_mode", "mode is out of range").WithField("mode");
  if (request.parents()) {
    Result<os::UniqueFd> present =
        os::OpenInRoot(root, request.path().c_str(), O_PATH | O_DIRECTORY);
    if (present.ok()) return v1::Empty();
    DSEC_TRY_VOID(MakeParents(root, Parent(request.path()), owner));
  }
  DSEC_TRY(Place place, FindPlace(root, request.path()));
  ScopedFsIdentity as(owner.uid, owner.gid);
  if (::mkdirat(place.directory.get(), place.name.c_str(), mode & 01777) != 0)
    return FileError(errno, request.path());
  // mkdir(2) knows no setuid and setgid bits.
  if ((mode & 06000) != 0 &&
      ::fchmodat(place.directory.get(), place.name.c_str(), mode, AT_SYMLINK_NOFOLLOW) != 0) {
    return FileError(errno, request.path());
  }
  return v1::Empty();
}

Result<v1::Empty> Move(int root, const v1::MoveRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.from(), "from"));
  DSEC_TRY_VOID(CheckFilePath(request.to(), "to"));
  DSEC_TRY(Place from, FindPlace(root, request.from()));
  DSEC_TRY(Place to, FindPlace(root, request.to()));
  ScopedFsIdentity as(0, 0);  // see NewFile::Publish
  unsigned flags = request.overwrite() ? 0 : RENAME_NOREPLACE;
  auto rename = [&](int dirfd, const std::string& name) {
    return ::renameat2(dirfd, name.c_str(), to.directory.get(), to.name.c_str(), flags) == 0;
  };
  if (rename(from.directory.get(), from.name)) return v1::Empty();
  if (errno != EXDEV) return FileError(errno, request.to());
  std::string temporary = NewHiddenName();
  Result<void> copied = CopyTree(from.directory.get(), from.name, to.directory.get(), temporary);
  if (copied.ok() && !rename(to.directory.get(), temporary))
    copied = FileError(errno, request.to());
  if (!copied.ok()) {
    Result<void> cleaned = os::RemoveTree(to.directory.get(), temporary.c_str());
    if (!cleaned.ok())
      return std::move(copied).Context("and its copy could not be removed").error();
    return std::move(copied).error();
  }
  Result<void> removed = os::RemoveTree(from.directory.get(), from.name.c_str());
  if (!removed.ok()) return FileError(removed.error().sys_errno(), request.from());
  return v1::Empty();
}

Result<v1::Empty> Remove(int root, const v1::RemoveRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  DSEC_TRY(Place place, FindPlace(root, request.path()));
  if (::unlinkat(place.directory.get(), place.name.c_str(), 0) == 0) return v1::Empty();
  if (errno != EISDIR) return FileError(errno, request.path());
  if (::unlinkat(place.directory.get(), place.name.c_str(), AT_REMOVEDIR) == 0) return v1::Empty();
  if (errno != ENOTEMPTY || !request.recursive()) return FileError(errno, request.path());
  Result<void> removed = os::RemoveTree(place.directory.get(), place.name.c_str());
  if (removed.ok()) return v1::Empty();
  int failure = removed.error().sys_errno();
  return FileError(failure == 0 ? EBUSY : failure, request.path());
}

Result<v1::Empty> Chmod(int root, const v1::ChmodRequest& request) {
  DSEC_TRY_VOID(CheckFilePath(request.path(), "path"));
  if (request.has_mode() && request.mode() > 07777) {
    return Error(Code::kInvalidArgument, "file.bad_mode", "mode is out of range").WithField("mode");
  }
  DSEC_TRY(os::UniqueFd file, Open(root, request.path(), O_PATH));
  if (!request.user().empty()) {
    DSEC_TRY(Identity owner, LookUpIdentity(root, request.user()));
    if (::fchownat(file.get(), "", ToAgentId(owner.uid), ToAgentId(owner.gid), AT_EMPTY_PATH) !=
        0) {
      return FileError(errno, request.path());
    }
  }
  // After the owner: changing that clears setuid and setgid. By /proc because an O_PATH descriptor
  // has no fchmod.
  if (request.has_mode() &&
      ::chmod(fmt::format("/proc/self/fd/{}", file.get()).c_str(), request.mode()) != 0) {
    return FileError(errno, request.path());
  }
  return v1::Empty();
}

}  // namespace dsec::aether
