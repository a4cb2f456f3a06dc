// SPDX-License-Identifier: Apache-2.0
#include "image/content_order.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "image/path.h"

namespace dsec::image {
namespace {

std::optional<uint64_t> Number(std::string_view text) {
  uint64_t value = 0;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

const Inode* FindFile(const Tree& tree, std::string_view path) {
  const auto clean = CleanPath(path, std::numeric_limits<uint64_t>::max());
  if (!clean.ok()) return nullptr;
  const auto [parent, name] = Split(*clean);
  const auto folder = tree.Walk(Tree::kRoot, parent);
  const Name* found = folder.ok() ? tree.Find(*folder, name) : nullptr;
  if (found == nullptr || !tree.inode(found->inode).is_file()) return nullptr;
  return &tree.inode(found->inode);
}

void PlacePart(const Inode& file, uint64_t first, uint64_t end, ChunkStore& chunks) {
  for (uint64_t i = first; i < end; ++i) {
    const uint32_t chunk = chunks.chunk(static_cast<uint32_t>(file.data + i));
    if (chunk != ChunkStore::kHole) chunks.Place(chunk);
  }
}

void PlaceBelow(const Tree& tree, uint32_t folder, ChunkStore& chunks) {
  for (const auto& [name, entry] : tree.folder(folder).names) {
    const Inode& inode = tree.inode(entry.inode);
    if (inode.is_folder()) {
      PlaceBelow(tree, inode.data, chunks);
    } else if (inode.is_file()) {
      PlacePart(inode, 0, ChunkStore::CountOf(inode.size), chunks);
    }
  }
}

Result<void> SettleBelow(const Tree& tree, uint32_t folder, ChunkStore& chunks) {
  for (const auto& [name, entry] : tree.folder(folder).names) {
    const Inode& inode = tree.inode(entry.inode);
    if (inode.is_folder()) {
      DSEC_TRY_VOID(SettleBelow(tree, inode.data, chunks));
    } else if (inode.is_file()) {
      DSEC_TRY_VOID(chunks.Settle(inode.data, inode.size));
    }
  }
  return Ok();
}

}  // namespace

Result<std::vector<FirstTouch>> ParseFirstTouch(std::string_view text) {
  std::vector<FirstTouch> list;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t newline = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, newline);
    text.remove_prefix(std::min(newline + 1, text.size()));
    if (line.empty()) continue;
    const size_t tab = line.find('\t');
    FirstTouch& touch = list.emplace_back(FirstTouch{.path = std::string(line.substr(0, tab))});
    if (tab == std::string_view::npos) continue;
    const std::string_view range = line.substr(tab + 1);
    const size_t second = range.find('\t');
    const auto offset = Number(range.substr(0, second));
    const auto length =
        second == std::string_view::npos ? std::nullopt : Number(range.substr(second + 1));
    if (!offset || !length) {
      return Error(Code::kInvalidArgument, "layer.bad_first_touch",
                   fmt::format("line {}: \"{}\" is neither PATH nor PATH<tab>OFFSET<tab>LENGTH",
                               number, Printable(line)))
          .WithField("first_touch");
    }
    touch.offset = *offset;
    touch.length = *length;
  }
  return list;
}

Result<void> SettleContent(const Tree& tree, ChunkStore& chunks) {
  return SettleBelow(tree, Tree::kRoot, chunks);
}

void PlaceContent(const Tree& tree, const std::vector<FirstTouch>& first, ChunkStore& chunks,
                  Warnings& warnings) {
  for (const FirstTouch& touch : first) {
    const Inode* file = FindFile(tree, touch.path);
    if (file == nullptr) {
      warnings.Add(
          fmt::format("first touch of \"{}\": no file of the layer", Printable(touch.path)));
      continue;
    }
    const uint64_t start = std::min(touch.offset, file->size);
    const uint64_t end = start + std::min(touch.length, file->size - start);
    PlacePart(*file, start / ChunkStore::kChunkBytes, ChunkStore::CountOf(end), chunks);
  }
  PlaceBelow(tree, Tree::kRoot, chunks);
}

}  // namespace dsec::image
