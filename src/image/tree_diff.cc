// SPDX-License-Identifier: Apache-2.0
#include "image/tree_diff.h"

#include <sys/stat.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace dsec::image {
namespace {

bool SameAttributes(const Inode& a, const Inode& b) {
  return a.size == b.size && a.mtime_sec == b.mtime_sec && a.mtime_nsec == b.mtime_nsec &&
         a.uid == b.uid && a.gid == b.gid && a.data == b.data && a.xattrs == b.xattrs &&
         a.mode == b.mode;
}

class Differ {
 public:
  Differ(const Tree& below, const Tree& after, Tree& out)
      : below_(below), after_(after), out_(out), moved_(after.inode_count()) {}

  void Run() {
    FindMoved(Tree::kRoot, &below_.folder(Tree::kRoot));
    Inode root = after_.inode(after_.folder(Tree::kRoot).inode);
    Describe(root);
    root.data = Tree::kRoot;
    root.links = 1;
    out_.inode(Tree::kRoot) = root;
    path_ = {{Tree::kRoot, Tree::kRoot, {}}};
    Walk(Tree::kRoot, &below_.folder(Tree::kRoot));
  }

 private:
  // The folder of `below` in that place; null: none, or one that has nothing in common.
  const Folder* Counterpart(const Folder* folder, std::string_view name, const Inode& after) const {
    const Name* found = FindBelow(folder, name);
    if (found == nullptr) return nullptr;
    const Inode& inode = below_.inode(found->inode);
    if (!inode.is_folder()) return nullptr;
    const Folder& candidate = below_.folder(inode.data);
    return Hidden(candidate, after_.folder(after.data)) ? nullptr : &candidate;
  }

  // Whether nothing of the folder below shows any more, though it held something.
  bool Hidden(const Folder& below, const Folder& after) const {
    return !below.names.empty() && std::ranges::none_of(after.names, [&](const auto& item) {
      const auto found = below.names.find(item.first);
      return found != below.names.end() && found->second.inode == item.second.inode;
    });
  }

  static const Name* FindBelow(const Folder* folder, std::string_view name) {
    if (folder == nullptr) return nullptr;
    const auto found = folder->names.find(name);
    return found == folder->names.end() ? nullptr : &found->second;
  }

  // Marks inodes that have a name which does not lead to them below.
  void FindMoved(uint32_t index, const Folder* below) {
    for (const auto& [text, name] : after_.folder(index).names) {
      const Inode& inode = after_.inode(name.inode);
      if (inode.is_folder()) {
        FindMoved(inode.data, Counterpart(below, text, inode));
        continue;
      }
      const Name* found = FindBelow(below, text);
      if (found == nullptr || found->inode != name.inode ||
          !SameAttributes(below_.inode(found->inode), inode))
        moved_[name.inode] = true;
    }
  }

  struct Step {
    uint32_t after = 0;    // folder
    uint32_t out = kNone;  // folder, once something is in it
    std::string_view name;
  };

  // The present folder in `out`, made with those on the way.
  uint32_t Here() {
    for (size_t i = 1; i < path_.size(); ++i) {
      if (path_[i].out != kNone) continue;
      const Folder& folder = after_.folder(path_[i].after);
      path_[i].out = out_.AddFolder(path_[i - 1].out, path_[i].name, 1);
      Inode& made = out_.inode(out_.folder(path_[i].out).inode);
      Inode as = after_.inode(folder.inode);
      Describe(as);
      as.data = made.data;
      as.links = made.links;
      made = as;
    }
    return path_.back().out;
  }

  void Walk(uint32_t index, const Folder* below) {
    const Folder& after = after_.folder(index);
    for (const auto& [text, name] : after.names) {
      const Inode& inode = after_.inode(name.inode);
      if (inode.is_folder()) {
        WalkFolder(text, inode, below);
      } else if (moved_[name.inode]) {
        Add(text, name.inode);
      }
    }
    if (below == nullptr) return;
    for (const auto& [text, name] : below->names) {
      if (after.names.contains(text)) continue;
      const uint32_t here = Here();
      out_.Link(here, text, out_.AddInode({.data = 0, .mode = S_IFCHR}), 1);
    }
  }

  void WalkFolder(std::string_view text, const Inode& inode, const Folder* below) {
    const Folder* counterpart = Counterpart(below, text, inode);
    path_.push_back({inode.data, kNone, text});
    const Name* found = FindBelow(below, text);
    if (counterpart == nullptr || !SameAttributes(below_.inode(found->inode), inode)) Here();
    // Whatever is below, were it in a pair further down.
    if (counterpart == nullptr && found != nullptr) out_.folder(Here()).opaque = true;
    Walk(inode.data, counterpart);
    path_.pop_back();
  }

  void Add(std::string_view text, uint32_t index) {
    const uint32_t here = Here();
    const auto [place, added] = made_.try_emplace(index, 0);
    if (added) {
      Inode inode = after_.inode(index);
      Describe(inode);
      if (inode.is_link()) inode.data = out_.AddTarget(after_.target(after_.inode(index)));
      place->second = out_.AddInode(inode);
    }
    out_.Link(here, text, place->second, 1);
  }

  // Attributes are numbered by each tree for itself.
  void Describe(Inode& inode) {
    if (inode.xattrs == kNone) return;
    std::vector<Xattr> set;
    for (const Xattr* xattr : after_.xattrs().set(inode.xattrs)) set.push_back(*xattr);
    inode.xattrs = out_.xattrs().Intern(set);
  }

  const Tree& below_;
  const Tree& after_;
  Tree& out_;
  std::vector<bool> moved_;                      // by inode of `after`
  std::unordered_map<uint32_t, uint32_t> made_;  // inodes of `out`, by those of `after`
  std::vector<Step> path_;
};

}  // namespace

void DiffTrees(const Tree& below, const Tree& after, Tree& out) { Differ(below, after, out).Run(); }

}  // namespace dsec::image
