// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "image/xattr.h"

namespace dsec::image {

inline constexpr uint32_t kNone = UINT32_MAX;

// What several names may lead to.
struct Inode {
  uint64_t size = 0;  // of a file
  int64_t mtime_sec = 0;
  uint32_t mtime_nsec = 0;
  uint32_t uid = 0;
  uint32_t gid = 0;
  uint32_t links = 0;  // names that lead here; 0: gone
  // File: its first chunk reference (chunk_store.h). Folder, symbolic link: index of its Folder or
  // target. Device: its number as makedev() gives it.
  uint32_t data = kNone;
  uint32_t xattrs = kNone;  // a set of XattrTable; kNone: none
  uint16_t mode = 0;        // with the type

  bool is_folder() const { return S_ISDIR(mode); }
  bool is_link() const { return S_ISLNK(mode); }
  bool is_file() const { return S_ISREG(mode); }
  bool is_whiteout() const { return S_ISCHR(mode) && data == 0; }  // of overlayfs: device 0:0
};

// One name in a folder.
struct Name {
  uint32_t inode = kNone;
  uint32_t layer = 0;  // the last that described it, counted from 1
};

struct Folder {
  std::map<std::string_view, Name> names;
  uint32_t inode = 0;
  uint32_t parent = 0;  // a folder's index; of the root: itself
  uint32_t depth = 0;
  bool opaque = false;  // hides, in an overlay, what lies below
};

// A tree of files without their content, in memory: about 200 bytes and its name an entry. What was
// removed keeps its memory, so the bound is that of all entries ever added. Not thread-safe.
class Tree {
 public:
  static constexpr uint32_t kRoot = 0;  // the root's index, as an inode and as a folder

  Tree();
  Tree(const Tree&) = delete;
  Tree& operator=(const Tree&) = delete;
  // The same tree, with the same indices. Later changes of one do not show in the other.
  std::unique_ptr<Tree> Clone() const;

  Folder& folder(uint32_t index) { return folders_[index]; }
  const Folder& folder(uint32_t index) const { return folders_[index]; }
  Inode& inode(uint32_t index) { return inodes_[index]; }
  const Inode& inode(uint32_t index) const { return inodes_[index]; }
  size_t inode_count() const { return inodes_.size(); }  // with those that are gone
  std::string_view target(const Inode& link) const { return targets_[link.data]; }
  XattrTable& xattrs() { return xattrs_; }
  const XattrTable& xattrs() const { return xattrs_; }

  const Name* Find(uint32_t folder, std::string_view name) const;
  Name* Find(uint32_t folder, std::string_view name);

  uint32_t AddInode(const Inode& inode);
  uint32_t AddTarget(std::string_view target);
  // `name` must be free.
  void Link(uint32_t folder, std::string_view name, uint32_t inode, uint32_t layer);
  // A new folder, root's, 0755, of time 0.
  uint32_t AddFolder(uint32_t parent, std::string_view name, uint32_t layer);
  // Takes the name away, of a folder with all below it. It must be there.
  void Unlink(uint32_t folder, std::string_view name);

  // The folder to which `path` leads from `folder` as after a chroot into the tree: links are
  // followed, absolute ones start at the root, ".." ends there. kInvalidArgument "layer.bad_path"
  // when it leads to no folder or over too many links.
  Result<uint32_t> Walk(uint32_t folder, std::string_view path) const;

 private:
  std::string_view Keep(std::string_view text);

  std::deque<Inode> inodes_;
  std::deque<Folder> folders_;
  std::vector<std::string_view> targets_;
  XattrTable xattrs_;
  std::vector<std::unique_ptr<char[]>> texts_;  // names and link targets
  size_t text_left_ = 0;
  char* text_next_ = nullptr;
};

}  // namespace dsec::image
