// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/dir_list.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string_view>

#include "os/file.h"

namespace dsec::sandbox {

Result<std::vector<DirEntry>> ListDir(int dirfd, const char* path) {
  DSEC_TRY(auto own, os::OpenAt(dirfd, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::fdopendir(own.get()), &::closedir);
  if (dir == nullptr) return os::ErrnoError("os.readdir", path);
  own.Release();
  std::vector<DirEntry> entries;
  while (true) {
    errno = 0;
    const dirent* entry = ::readdir(dir.get());
    if (entry == nullptr) {
      if (errno != 0) return os::ErrnoError("os.readdir", path);
      break;
    }
    const std::string_view name = entry->d_name;
    if (name == "." || name == "..") continue;
    bool is_dir = entry->d_type == DT_DIR;
    if (entry->d_type == DT_UNKNOWN) {
      struct stat info;
      is_dir = ::fstatat(::dirfd(dir.get()), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
               S_ISDIR(info.st_mode);
    }
    entries.push_back({std::string(name), is_dir});
  }
  std::ranges::sort(entries, {}, &DirEntry::name);
  return entries;
}

}  // namespace dsec::sandbox
