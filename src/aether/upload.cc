// SPDX-License-Identifier: Apache-2.0
#include "aether/upload.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <utility>

#include "aether/fs_identity.h"
#include "os/file.h"

namespace dsec::aether {
namespace {

constexpr int kMaxLinks = 40;  // as the kernel, path_resolution(7)
constexpr mode_t kDefaultMode = 0644;

}  // namespace

NewFile::NewFile(NewFile&& other) noexcept { *this = std::move(other); }

NewFile& NewFile::operator=(NewFile&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  directory_ = std::move(other.directory_);
  name_ = std::move(other.name_);
  file_ = std::move(other.file_);
  hidden_ = std::exchange(other.hidden_, {});
  owner_ = std::move(other.owner_);
  size_ = other.size_;
  return *this;
}

void NewFile::Drop() {
  if (!hidden_.empty()) ::unlinkat(directory_.get(), hidden_.c_str(), 0);
  hidden_.clear();
}

Result<NewFile> NewFile::Create(os::UniqueFd directory, std::string name, const Identity& owner) {
  NewFile file;
  file.directory_ = std::move(directory);
  file.name_ = std::move(name);
  file.owner_ = owner;
  ScopedFsIdentity as(owner.uid, owner.gid);
  file.file_.Reset(::openat(file.directory_.get(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file.file_.valid()) return file;
  // EISDIR comes from kernels or file systems that do not know the flag, open(2).
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)
    return FileError(errno, file.name_);
  std::string hidden = NewHiddenName();
  file.file_.Reset(::openat(file.directory_.get(), hidden.c_str(),
                            O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.file_.valid()) return FileError(errno, file.name_);
  file.hidden_ = std::move(hidden);
  return file;
}

Result<void> NewFile::Write(std::string_view data) {
  while (!data.empty()) {
    ssize_t written = ::pwrite(file_.get(), data.data(), data.size(), static_cast<off_t>(size_));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(errno, name_);
    size_ += static_cast<size_t>(written);
    data.remove_prefix(static_cast<size_t>(written));
  }
  return Ok();
}

Result<void> NewFile::Extend(uint64_t size) {
  if (size <= size_) return Ok();
  if (size > INT64_MAX || ::ftruncate(file_.get(), static_cast<off_t>(size)) != 0) {
    return FileError(size > INT64_MAX ? EFBIG : errno, name_);
  }
  size_ = size;
  return Ok();
}

Result<void> NewFile::Commit(std::optional<mode_t> mode, Existing existing) {
  struct stat old;
  bool present = ::fstatat(directory_.get(), name_.c_str(), &old, AT_SYMLINK_NOFOLLOW) == 0;
  if (!present && errno != ENOENT) return FileError(errno, name_);
  if (present && S_ISDIR(old.st_mode)) return FileError(EISDIR, name_);
  mode_t final_mode = mode.value_or(kDefaultMode);
  if (present && existing == Existing::kKeepAttributes) {
    if (!S_ISREG(old.st_mode)) return FileError(ENXIO, name_);
    if (::fchown(file_.get(), old.st_uid, old.st_gid) != 0) return FileError(errno, name_);
    final_mode = mode.value_or(old.st_mode & 07777);
  }
  if (::fchmod(file_.get(), final_mode) != 0) return FileError(errno, name_);
  return Publish();
}

Result<void> NewFile::Publish() {
  // A file system of the sandbox's user namespace, such as its /dev/shm, takes new names from ids
  // of that namespace only (fsuidgid_has_mapping in fs/namei.c).
  ScopedFsIdentity as(owner_.uid, owner_.gid);
  if (hidden_.empty()) {
    std::string self = fmt::format("/proc/self/fd/{}", file_.get());
    auto link = [&](const std::string& name) {
      return ::linkat(AT_FDCWD, self.c_str(), directory_.get(), name.c_str(), AT_SYMLINK_FOLLOW) ==
             0;
    };
    if (link(name_)) return Ok();
    if (errno != EEXIST) return FileError(errno, name_);
    std::string hidden = NewHiddenName();
    if (!link(hidden)) return FileError(errno, name_);
    hidden_ = std::move(hidden);
  }
  if (::renameat(directory_.get(), hidden_.c_str(), directory_.get(), name_.c_str()) != 0) {
    return FileError(errno, name_);
  }
  hidden_.clear();
  return Ok();
}

Result<v1::FileInfo> NewFile::Info() const {
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) return FileError(errno, name_);
  return InfoOf(name_, status);
}

Result<Place> FindWritePlace(int root, const std::string& path, bool parents,
                             const Identity& owner) {
  std::string target = path;
  for (int links = 0; links <= kMaxLinks; ++links) {
    size_t slash = target.rfind('/');
    if (slash == target.size() - 1) return FileError(EISDIR, path);
    std::string directory = slash == 0 ? "/" : target.substr(0, slash);
    if (parents) DSEC_TRY_VOID(MakeParents(root, directory, owner));
    DSEC_TRY(Place place, FindPlace(root, target));
    char link[PATH_MAX];
    ssize_t size = ::readlinkat(place.directory.get(), place.name.c_str(), link, sizeof(link));
    if (size < 0) return place;  // no link, or nothing yet
    std::string_view text(link, static_cast<size_t>(size));
    target = text.starts_with('/') ? std::string(text) : directory + "/" + std::string(text);
    if (target.size() >= PATH_MAX) return FileError(ENAMETOOLONG, path);
    parents = false;
  }
  return FileError(ELOOP, path);
}

}  // namespace dsec::aether
