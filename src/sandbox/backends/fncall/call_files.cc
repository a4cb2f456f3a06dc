// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/call_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "os/file.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"
#include "sandbox/isolators/dir_list.h"

namespace dsec::sandbox {
namespace {

// Nothing is followed: the code makes links, and we read what it may not.
constexpr uint64_t kInside =
    RESOLVE_IN_ROOT | RESOLVE_NO_XDEV | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS;
// Of folders below one another that are looked through, and of files that one call brings back.
constexpr int kMaxDepth = 64;
constexpr size_t kMaxFetched = 4096;
constexpr uint32_t kDefaultMode = 0644;

Error Failed(const std::string& path, const char* what) {
  const int error = errno;
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return Error(Code::kResourceExhausted, "fn.files_too_large",
                 fmt::format("{} does not fit into the writable layer", path));
  }
  return os::ErrnoError("fn.write_files", fmt::format("{} {}", what, path)).WithErrno(error);
}

// Nanoseconds of the time of the last change.
int64_t Changed(const struct stat& info) {
  return info.st_ctim.tv_sec * 1'000'000'000 + info.st_ctim.tv_nsec;
}

// What is there gives way unless it is a folder.
Result<os::UniqueFd> EnterFolder(int dir, const std::string& name, const std::string& path,
                                 uint32_t owner) {
  for (int attempt = 0;; ++attempt) {
    os::UniqueFd folder(
        ::openat(dir, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (folder.valid()) return folder;
    if (attempt > 0) return Failed(path, "enter");
    if (errno != ENOENT && ::unlinkat(dir, name.c_str(), 0) != 0) return Failed(path, "replace");
    if (::mkdirat(dir, name.c_str(), 0755) != 0 ||
        ::fchownat(dir, name.c_str(), owner, owner, AT_SYMLINK_NOFOLLOW) != 0) {
      return Failed(path, "make the folder of");
    }
  }
}

}  // namespace

struct CallFiles::Found {
  uint64_t budget = 0;
  FnReport& report;
};

Result<void> CallFiles::WriteOne(const std::string& path, std::string_view content, uint32_t mode) {
  DSEC_TRY(auto folder, EnterFolder(root_, kWorkFolder, path, owner_));
  std::string_view rest = path;
  for (size_t slash = rest.find('/'); slash != std::string_view::npos; slash = rest.find('/')) {
    DSEC_TRY(folder, EnterFolder(folder.get(), std::string(rest.substr(0, slash)), path, owner_));
    rest.remove_prefix(slash + 1);
  }
  const std::string name(rest);
  if (::unlinkat(folder.get(), name.c_str(), 0) != 0 && errno != ENOENT)
    return Failed(path, "replace");
  const os::UniqueFd file(::openat(folder.get(), name.c_str(),
                                   O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.valid()) return Failed(path, "make");
  while (!content.empty()) {
    const ssize_t n = ::write(file.get(), content.data(), content.size());
    if (n < 0) return Failed(path, "write");
    content.remove_prefix(static_cast<size_t>(n));
  }
  struct stat info;
  if (::fchown(file.get(), owner_, owner_) != 0 ||
      ::fchmod(file.get(), (mode == 0 ? kDefaultMode : mode) & 0777) != 0 ||
      ::fstat(file.get(), &info) != 0) {
    return Failed(path, "own");
  }
  written_[path] = {info.st_ino, Changed(info)};
  return Ok();
}

Result<void> CallFiles::Write(const FnRun& run) {
  // A file of the call in the place of the code is what the call wants.
  if (!run.code_path.empty()) DSEC_TRY_VOID(WriteOne(run.code_path, run.code, kDefaultMode));
  for (const v1::FnFile* file : run.files)
    DSEC_TRY_VOID(WriteOne(file->path(), file->content(), file->mode()));
  return Ok();
}

bool CallFiles::FetchOne(int dir, const std::string& path, const std::string& name,
                         Found& found) const {
  if (found.report.files.size() >= kMaxFetched) return false;
  // First without opening it: a FIFO would wait, a device would act.
  const os::UniqueFd place(os::OpenAt2(dir, name.c_str(), O_PATH | O_CLOEXEC, 0, kInside));
  struct stat info;
  if (!place.valid() || ::fstat(place.get(), &info) != 0 || !S_ISREG(info.st_mode)) return false;
  // A hard link may be of a file that the code cannot read.
  if (info.st_uid != owner_ && (info.st_mode & S_IROTH) == 0) return false;
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > found.budget) return false;
  const auto file = os::OpenAt(AT_FDCWD, fmt::format("/proc/self/fd/{}", place.get()).c_str(),
                               O_RDONLY | O_NOCTTY);
  if (!file.ok()) return false;
  auto content = os::ReadAll(file->get(), size);
  if (!content.ok()) return false;
  found.budget -= content->size();
  found.report.files.push_back({path, std::move(*content), info.st_mode & 0777});
  return true;
}

void CallFiles::FetchBelow(int dir, const std::string& prefix, bool changed_only, int depth,
                           Found& found) const {
  const auto entries = ListDir(dir, ".");
  if (!entries.ok() || depth > kMaxDepth) {
    found.report.missing.push_back(prefix);
    return;
  }
  for (const DirEntry& entry : *entries) {
    const std::string path = prefix + entry.name;
    if (entry.is_dir) {
      const auto below = os::OpenAt(dir, entry.name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      if (below.ok()) {
        FetchBelow(below->get(), path + "/", changed_only, depth + 1, found);
      } else {
        found.report.missing.push_back(path);
      }
      continue;
    }
    struct stat info;
    if (::fstatat(dir, entry.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 ||
        !S_ISREG(info.st_mode)) {
      continue;  // links, sockets and what stands for a removed file
    }
    const auto written = written_.find(path);
    if (changed_only && written != written_.end() && written->second.second == Changed(info))
      continue;
    if (!FetchOne(dir, path, entry.name, found)) {
      if (found.report.missing.size() >= kMaxFetched) return;
      found.report.missing.push_back(path);
    }
  }
}

void CallFiles::Fetch(const FnRun& run, FnReport& report) const {
  Found found{run.fetch_bytes, report};
  for (const std::string& wanted : run.fetch) {
    const bool all = wanted == "*";
    const bool folder = wanted.ends_with('/');
    if (!all && !folder) {
      if (!FetchOne(root_, wanted, fmt::format("{}/{}", kWorkFolder, wanted), found))
        report.missing.push_back(wanted);
      continue;
    }
    // What the call made or changed is what the writable layer holds.
    const std::string path = all ? kWorkFolder : fmt::format("{}/{}", kWorkFolder, wanted);
    const os::UniqueFd dir(os::OpenAt2(all ? upper_ : root_, path.c_str(),
                                       O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0, kInside));
    if (dir.valid()) {
      FetchBelow(dir.get(), all ? "" : wanted, all, 0, found);
    } else if (!all) {
      report.missing.push_back(wanted);
    }
  }
}

}  // namespace dsec::sandbox
