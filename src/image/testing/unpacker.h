// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "base/result.h"
#include "image/entry.h"
#include "os/unique_fd.h"

namespace dsec::image::testing {

struct UnpackOptions {
  ImportLimits limits;
  // True for what will lie above another layer: whiteouts stay, as overlayfs wants them (character
  // device 0:0, folders with trusted.overlay.opaque). False for a base: they act on the layers of
  // the image and are gone.
  bool keep_whiteouts = false;
};

struct UnpackStats {
  uint64_t entries = 0;        // taken from the sources so far
  uint64_t content_bytes = 0;  // sum of file sizes so far
};

// Turns streams of entries into one tree below a folder that only root can enter. Nothing is
// written elsewhere: the folders on the way to a member are resolved inside the tree as after a
// chroot (a link to /etc leads to the tree's own /etc), the last component is never followed, ".."
// is refused, existing files are replaced and never opened. Devices are made and never opened.
// Members of one image come layer by layer; a later layer changes what lower ones left, by the
// rules of the OCI image specification. Within a layer the last of several members of one name
// counts.
//
// xattrs of trusted.overlay.* in the input would steer the overlay that the layer becomes part of:
// they are left out with a warning. Owner, mode, xattrs, mtimes in ns, hard links and holes are
// kept. Folders that no entry describes are root's, 0755, of time 0.
//
// Single-threaded. After an error the tree is to be thrown away.
class Unpacker {
 public:
  // `tree`: an empty folder. `warnings` must outlive this object.
  Unpacker(os::UniqueFd tree, const UnpackOptions& options, Warnings& warnings);

  void BeginLayer(bool has_whiteouts);
  Result<void> Add(const Entry& entry, EntrySource& source);
  // Sets the times of folders. Returns the number of entries that the tree holds, its root not
  // counted.
  Result<uint64_t> Finish();

  const UnpackStats& stats() const { return stats_; }
  // Asked between pieces of work; false ends the unpacking with kCancelled "layer.cancelled".
  void set_proceed(std::function<bool()> proceed) { proceed_ = std::move(proceed); }

 private:
  struct Parent {
    std::string path;
    os::UniqueFd fd;
    uint64_t inode = 0;
  };
  struct Time {
    int64_t sec = 0;
    uint32_t nsec = 0;
  };

  Result<void> AddInner(const Entry& entry, const std::string& path, EntrySource& source);
  Result<void> Count(const Entry& entry);
  Result<const Parent*> OpenParent(std::string_view path);
  Result<void> MakeParents(std::string_view path);
  Result<void> ApplyWhiteout(std::string_view parent, std::string_view target);
  Result<void> ApplyOpaque(std::string_view folder);
  Result<void> MakeDirectory(const Parent& parent, const std::string& name, const Entry& entry);
  Result<void> MakeFile(const Parent& parent, const std::string& name, const Entry& entry,
                        EntrySource& source);
  Result<void> MakeSpecial(const Parent& parent, const std::string& name, const Entry& entry);
  Result<void> MakeHardlink(const Parent& parent, const std::string& name, const Entry& entry);
  Result<void> SetDirectory(int fd, const Entry& entry);
  Result<void> SetXattrs(const std::string& path, const Entry& entry);
  // Removes what lower layers left below `dirfd`; what this layer brought stays.
  Result<void> RemoveLower(int dirfd, uint64_t depth);
  Result<void> Remove(int dirfd, const std::string& name);
  // After a removal the same path may lead elsewhere. The descriptor stays open for whoever uses it
  // now.
  void ForgetParent() { parent_.path = "."; }  // no cleaned path: never found again
  Result<void> CheckSpace();
  Result<uint64_t> FinishDirectory(int dirfd, uint64_t depth);

  static std::string Key(uint64_t folder_inode, std::string_view name);
  bool Touched(uint64_t folder_inode, std::string_view name) const {
    return touched_.contains(Key(folder_inode, name));
  }

  os::UniqueFd tree_;
  UnpackOptions options_;
  Warnings& warnings_;
  std::function<bool()> proceed_;
  UnpackStats stats_;
  bool has_whiteouts_ = false;
  uint64_t metadata_bytes_ = 0;
  uint64_t written_bytes_ = 0;
  uint64_t checked_bytes_ = 0;
  Parent parent_;  // of the last member, for runs of members of one folder
  std::unordered_set<std::string> touched_;             // by this layer: folder's inode and name
  std::unordered_map<uint64_t, Time> directory_times_;  // by inode
};

}  // namespace dsec::image::testing
