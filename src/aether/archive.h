// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aether/directory.h"
#include "aether/files.h"
#include "aether/tar.h"
#include "aether/upload.h"
#include "base/result.h"
#include "os/unique_fd.h"

// A directory of the sandbox as a tar stream, out and in. Both block and live on one worker thread
// at a time.
namespace dsec::aether {

// Names are relative to the directory, which has no entry itself. Follows no link and stays on its
// mount. Left out, each with a warning: devices and sockets, mounts below, what cannot be read,
// more than kMaxDepth levels. A file that shrinks while it is read is filled up with zeros, with a
// warning.
class ArchiveWriter {
 public:
  static constexpr size_t kMaxDepth = 128;
  static constexpr size_t kMaxWarnings = 100;
  static constexpr size_t kMaxHardLinks = 65536;

  static Result<std::unique_ptr<ArchiveWriter>> Open(int root, const std::string& path);

  // The next bytes, at least one unless the archive has ended, at most about `max_bytes`.
  Result<std::string> Read(size_t max_bytes);
  bool ended() const { return ended_; }
  // Those since the last call.
  std::vector<std::string> TakeWarnings() { return std::move(warnings_); }

 private:
  struct Level {
    os::UniqueFd directory;
    std::unique_ptr<DirectoryReader> reader;
    std::string prefix;
  };

  void Next();
  void AddEntry(const std::string& name);
  void AddFile(int directory, const std::string& name, const struct stat& status, TarEntry& entry);
  void AddData(size_t max_bytes);
  void Warn(std::string_view path, std::string_view why);

  std::vector<Level> levels_;
  std::map<std::pair<dev_t, ino_t>, std::string> hard_links_;
  os::UniqueFd file_;  // being copied
  TarEntry file_entry_;
  size_t range_ = 0;
  uint64_t range_done_ = 0;
  bool shrank_ = false;
  std::string pending_;
  std::vector<std::string> warnings_;
  size_t warned_ = 0;
  bool ended_ = false;
};

// Everything that is made belongs to `owner`, whatever the archive says; setuid and setgid bits are
// dropped. Refused: names with "..", links of the archive or of the target that lead out of the
// target directory (when that is not the sandbox's root), devices. Files replace files as a whole;
// a directory is merged; a directory is never replaced by something else. What has been unpacked
// before an error or an abort stays.
class ArchiveReader : private TarReader::Sink {
 public:
  static Result<std::unique_ptr<ArchiveReader>> Open(int root, const std::string& path,
                                                     const Identity& owner);

  Result<void> Feed(std::string_view data);
  Result<void> Finish() { return reader_.Finish(); }
  uint64_t entries() const { return entries_; }
  uint64_t bytes() const { return bytes_; }

 private:
  ArchiveReader(os::UniqueFd target, Identity owner, uint64_t resolve)
      : target_(std::move(target)), owner_(std::move(owner)), resolve_(resolve), reader_(*this) {}

  Result<void> OnEntry(const TarEntry& entry) override;
  Result<void> OnData(uint64_t offset, std::string_view data) override;
  Result<void> OnEntryEnd() override;
  Result<os::UniqueFd> OpenIn(const std::string& path, int flags) const;
  Result<os::UniqueFd> OpenParent(const std::string& path);
  Result<void> MakeDirectory(int parent, const std::string& name, uint32_t mode);
  Result<void> MakeHardLink(int parent, const std::string& name, const std::string& target);
  // Runs `make` and once more after removing a non-directory that is in the way.
  template <typename Make>
  Result<void> Replace(int parent, const std::string& name, Make make);

  os::UniqueFd target_;
  const Identity owner_;
  const uint64_t resolve_;
  TarReader reader_;
  std::optional<NewFile> file_;
  TarEntry entry_;
  uint64_t entries_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace dsec::aether
