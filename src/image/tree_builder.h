// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "image/chunk_store.h"
#include "image/entry.h"
#include "image/tree.h"

namespace dsec::image {

struct TreeOptions {
  ImportLimits limits;
  // True for what will lie above another layer: whiteouts stay, as overlayfs wants them (character
  // device 0:0, folders with trusted.overlay.opaque). False for a base: they act on the layers of
  // the image and are gone.
  bool keep_whiteouts = false;
};

struct TreeStats {
  uint64_t entries = 0;        // taken from the sources so far
  uint64_t content_bytes = 0;  // sum of file sizes so far
};

// Turns streams of entries into one tree; the content of files goes to a chunk store as it comes.
// Nothing is made on a file system. The folders on the way to a member are resolved inside the tree
// as after a chroot (a link to /etc leads to the tree's own /etc), the last component is never
// followed, ".." is refused. Members of one image come layer by layer; a later layer changes what
// lower ones left, by the rules of the OCI image specification. Within a layer the last of several
// members of one name counts.
//
// xattrs of trusted.overlay.* in the input would steer the overlay that the layer becomes part of:
// they are left out with a warning. Folders that no entry describes are root's, 0755, of time 0.
//
// Single-threaded. After an error the tree is to be thrown away.
class TreeBuilder {
 public:
  // All must outlive this object; `tree` is empty.
  TreeBuilder(Tree& tree, ChunkStore& chunks, const TreeOptions& options, Warnings& warnings);

  void BeginLayer(bool has_whiteouts);
  Result<void> Add(const Entry& entry, EntrySource& source);

  const TreeStats& stats() const { return stats_; }
  // Asked between pieces of work; false ends it with kCancelled "layer.cancelled".
  void set_proceed(std::function<bool()> proceed) { proceed_ = std::move(proceed); }

 private:
  Result<void> AddInner(const Entry& entry, const std::string& path, EntrySource& source);
  Result<void> Count(const Entry& entry);
  Result<uint32_t> OpenParent(std::string_view path);
  Result<uint32_t> EnterOrMake(uint32_t folder, std::string_view name);
  Result<uint32_t> MakeFolder(uint32_t parent, std::string_view name);
  Result<void> ApplyWhiteout(std::string_view parent, std::string_view target);
  Result<void> ApplyOpaque(std::string_view folder);
  Result<void> AddDirectory(uint32_t parent, std::string_view name, const Entry& entry);
  Result<void> AddFile(uint32_t parent, std::string_view name, const Entry& entry,
                       EntrySource& source);
  Result<void> AddSpecial(uint32_t parent, std::string_view name, const Entry& entry);
  Result<void> AddHardlink(uint32_t parent, std::string_view name, const Entry& entry);
  Result<Inode> Describe(const Entry& entry, mode_t type);
  Result<uint32_t> TakeXattrs(const Entry& entry, mode_t mode);
  // Removes what lower layers left below the folder; what this layer brought stays.
  void RemoveLower(uint32_t folder);
  void Remove(uint32_t folder, std::string_view name);

  Tree& tree_;
  ChunkStore& chunks_;
  TreeOptions options_;
  Warnings& warnings_;
  std::function<bool()> proceed_;
  TreeStats stats_;
  bool has_whiteouts_ = false;
  uint32_t layer_ = 0;
  uint64_t metadata_bytes_ = 0;
  // Of the last member, for runs of members of one folder. A removal may make the same path lead
  // elsewhere.
  std::string parent_path_;
  uint32_t parent_ = kNone;
};

}  // namespace dsec::image
