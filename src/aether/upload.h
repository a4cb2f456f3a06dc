// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "aether/files.h"
#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::aether {

// A file that appears whole or not at all: written to an unnamed file (a hidden name where the file
// system has no O_TMPFILE) in the target's directory, given its owner and mode, then linked or
// renamed into place. Destroying it without Commit leaves nothing. Blocks; one thread at a time.
class NewFile {
 public:
  NewFile() = default;
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&& other) noexcept;
  ~NewFile() { Drop(); }

  // `directory` and `name` say where it will be; `owner` is that of a new file.
  static Result<NewFile> Create(os::UniqueFd directory, std::string name, const Identity& owner);
  Result<void> Write(std::string_view data);
  // Leaves a hole up to `size`.
  Result<void> Extend(uint64_t size);
  uint64_t size() const { return size_; }
  int fd() const { return file_.get(); }

  enum class Existing {
    kKeepAttributes,  // an overwritten file keeps owner and mode; `mode` counts only when given
    kReplace,         // whatever is there that is no directory goes
  };
  // Makes it visible. Refuses to replace a directory, and with kKeepAttributes anything but a
  // regular file.
  Result<void> Commit(std::optional<mode_t> mode, Existing existing);
  Result<v1::FileInfo> Info() const;

 private:
  Result<void> Publish();
  void Drop();

  os::UniqueFd directory_;
  std::string name_;
  os::UniqueFd file_;
  std::string hidden_;  // its present name, if it has one
  Identity owner_;
  uint64_t size_ = 0;
};

// Where a write to `path` goes: a symbolic link at its end is followed, also a dangling one, as
// open(2) with O_CREAT would.
Result<Place> FindWritePlace(int root, const std::string& path, bool parents,
                             const Identity& owner);

}  // namespace dsec::aether
