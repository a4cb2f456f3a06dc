// SPDX-License-Identifier: Apache-2.0
#include "image/tree.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace dsec::image {
namespace {

constexpr size_t kTextBlock = 64 << 10;
constexpr int kMaxLinks = 40;    // include/linux/namei.h MAXSYMLINKS
constexpr int kMaxSteps = 4096;  // names on one way; links to links could make it endless

}  // namespace

Tree::Tree() {
  inodes_.push_back(Inode{.links = 1, .data = kRoot, .mode = S_IFDIR | 0755});
  folders_.emplace_back();
}

const Name* Tree::Find(uint32_t folder, std::string_view name) const {
  const auto& names = folders_[folder].names;
  const auto found = names.find(name);
  return found == names.end() ? nullptr : &found->second;
}

Name* Tree::Find(uint32_t folder, std::string_view name) {
  return const_cast<Name*>(std::as_const(*this).Find(folder, name));
}

std::unique_ptr<Tree> Tree::Clone() const {
  auto copy = std::make_unique<Tree>();
  copy->inodes_ = inodes_;
  copy->folders_.clear();
  for (const Folder& folder : folders_) {
    Folder& made = copy->folders_.emplace_back();
    made.inode = folder.inode;
    made.parent = folder.parent;
    made.depth = folder.depth;
    made.opaque = folder.opaque;
    for (const auto& [text, name] : folder.names)
      made.names.emplace_hint(made.names.end(), copy->Keep(text), name);
  }
  copy->targets_.reserve(targets_.size());
  for (const std::string_view target : targets_) copy->targets_.push_back(copy->Keep(target));
  for (uint32_t i = 0; i < xattrs_.count(); ++i) {
    std::vector<Xattr> set;
    for (const Xattr* xattr : xattrs_.set(i)) set.push_back(*xattr);
    DSEC_CHECK(copy->xattrs_.Intern(set) == i);
  }
  return copy;
}

std::string_view Tree::Keep(std::string_view text) {
  if (text.size() > text_left_) {
    text_left_ = std::max(kTextBlock, text.size());
    texts_.push_back(std::make_unique_for_overwrite<char[]>(text_left_));
    text_next_ = texts_.back().get();
  }
  std::memcpy(text_next_, text.data(), text.size());
  const std::string_view kept(text_next_, text.size());
  text_next_ += text.size();
  text_left_ -= text.size();
  return kept;
}

uint32_t Tree::AddInode(const Inode& inode) {
  inodes_.push_back(inode);
  inodes_.back().links = 0;
  return static_cast<uint32_t>(inodes_.size() - 1);
}

uint32_t Tree::AddTarget(std::string_view target) {
  targets_.push_back(Keep(target));
  return static_cast<uint32_t>(targets_.size() - 1);
}

void Tree::Link(uint32_t folder, std::string_view name, uint32_t inode, uint32_t layer) {
  const bool added = folders_[folder].names.emplace(Keep(name), Name{inode, layer}).second;
  DSEC_CHECK(added);
  ++inodes_[inode].links;
}

uint32_t Tree::AddFolder(uint32_t parent, std::string_view name, uint32_t layer) {
  const auto index = static_cast<uint32_t>(folders_.size());
  Folder folder;
  folder.inode = AddInode(Inode{.data = index, .mode = S_IFDIR | 0755});
  folder.parent = parent;
  folder.depth = folders_[parent].depth + 1;
  folders_.push_back(std::move(folder));
  Link(parent, name, folders_.back().inode, layer);
  return index;
}

void Tree::Unlink(uint32_t folder, std::string_view name) {
  const auto found = folders_[folder].names.find(name);
  DSEC_CHECK(found != folders_[folder].names.end());
  Inode& inode = inodes_[found->second.inode];
  folders_[folder].names.erase(found);
  --inode.links;
  if (!inode.is_folder()) return;
  auto& below = folders_[inode.data].names;
  while (!below.empty()) Unlink(inode.data, std::string_view(below.begin()->first));
}

Result<uint32_t> Tree::Walk(uint32_t folder, std::string_view path) const {
  const auto refuse = [](std::string_view rule) {
    return Error(Code::kInvalidArgument, "layer.bad_path", std::string(rule));
  };
  if (path.starts_with('/')) folder = kRoot;
  std::vector<std::string_view> rest = {path};  // what is left of the links entered, last on top
  int links = 0;
  int steps = 0;
  while (!rest.empty()) {
    if (rest.back().empty()) {
      rest.pop_back();
      continue;
    }
    std::string_view& text = rest.back();
    const size_t slash = std::min(text.find('/'), text.size());
    const std::string_view part = text.substr(0, slash);
    text.remove_prefix(std::min(slash + 1, text.size()));
    if (part.empty() || part == ".") continue;
    if (++steps > kMaxSteps) return refuse("the way is too long");
    if (part == "..") {
      folder = folders_[folder].parent;
      continue;
    }
    const Name* name = Find(folder, part);
    if (name == nullptr) return refuse("leads to nothing");
    const Inode& inode = inodes_[name->inode];
    if (inode.is_folder()) {
      folder = inode.data;
    } else if (inode.is_link()) {
      if (++links > kMaxLinks) return refuse("leads over too many links");
      const std::string_view next = target(inode);
      if (next.starts_with('/')) folder = kRoot;
      rest.push_back(next);
    } else {
      return refuse("leads to something that is no folder");
    }
  }
  return folder;
}

}  // namespace dsec::image
