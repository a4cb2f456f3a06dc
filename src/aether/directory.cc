// SPDX-License-Identifier: Apache-2.0
#include "aether/directory.h"

#include <dirent.h>

#include <cerrno>

#include "aether/files.h"

namespace dsec::aether {

Result<std::optional<DirectoryReader::Entry>> DirectoryReader::Next() {
  while (true) {
    if (position_ >= size_) {
      ssize_t size = ::getdents64(fd_, buffer_, sizeof(buffer_));
      if (size < 0 && errno == EINTR) continue;
      // A directory that has been removed has no entries.
      if (size < 0 && errno != ENOENT) return FileError(errno, "directory");
      if (size <= 0) return std::optional<Entry>();
      size_ = static_cast<size_t>(size);
      position_ = 0;
    }
    const auto* entry = reinterpret_cast<const dirent64*>(buffer_ + position_);
    position_ += entry->d_reclen;
    std::string_view name = entry->d_name;
    if (name != "." && name != "..") return std::optional<Entry>(Entry{name, entry->d_type});
  }
}

}  // namespace dsec::aether
