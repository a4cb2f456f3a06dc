// SPDX-License-Identifier: Apache-2.0
// What keeps content once that several layers of the store have. Nothing of it decides whether a
// layer can be built: content that cannot be shared is kept twice.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/canonical_blob.h"
#include "image/chunk_index.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/layer_check.h"
#include "image/layer_files.h"
#include "image/layer_store.h"
#include "image/share_content.h"
#include "image/share_meta.h"
#include "image/store_work.h"
#include "image/tree_builder.h"
#include "os/file.h"

namespace dsec::image {

namespace {

// All of a file as a list: the chunks that are known, and what lies between them in pieces, for a
// list that leaves something out says nothing of what follows.
Result<std::vector<ChunkStore::Placed>> ListFile(int fd, uint64_t size,
                                                 std::vector<BlobExtent> chunks, uint64_t seed,
                                                 const std::function<bool(uint64_t)>& proceed) {
  constexpr uint64_t kBlock = StoredForm::kBlock;
  constexpr uint32_t kPiece = ChunkStore::kChunkBytes / kBlock;
  std::ranges::sort(chunks, {}, &BlobExtent::block);
  const auto blocks = static_cast<uint32_t>(size / kBlock);
  std::vector<ChunkStore::Placed> list;
  std::vector<uint8_t> bytes;
  auto known = chunks.begin();
  for (uint32_t block = 0; block < blocks;) {
    while (known != chunks.end() && known->block < block) ++known;
    uint32_t count = std::min(kPiece, blocks - block);
    if (known != chunks.end()) {
      count = known->block == block ? std::min(known->blocks, blocks - block)
                                    : std::min(count, known->block - block);
    }
    bytes.resize(count * kBlock);
    DSEC_TRY_VOID(CanonicalBlob({fd}, nullptr, size).ReadAt(block * kBlock, bytes));
    list.push_back({ChunkStore::HashOf(bytes, seed), block, count});
    block += count;
    if (!proceed(block * kBlock))
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while reading content");
  }
  return list;
}

}  // namespace

// What IndexContent knows: the file of the index that an inode is, and the places that are there.
struct LayerStore::Indexing {
  ChunkIndex& index;
  std::map<std::pair<dev_t, ino_t>, int64_t> files;
  std::set<std::string> places;
  std::function<bool(uint64_t)> proceed;
};

std::string LayerStore::IndexPath() const { return root_ + "/" + kChunkIndexName; }

std::optional<uint64_t> LayerStore::IndexSeed() const {
  const auto index = ChunkIndex::Open(IndexPath());
  if (index.ok()) return (*index)->seed();
  log::Warn("layer.chunk_index", {{"store", root_}, {"error", index.error()}});
  return std::nullopt;
}

Result<std::optional<SharedContent>> LayerStore::Share(int out, const ChunkStore& chunks,
                                                       const std::function<bool(uint64_t)>& proceed,
                                                       Warnings& warnings) const {
  const auto share = [&]() -> Result<std::optional<SharedContent>> {
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    if (index->seed() != chunks.seed())
      return Error(Code::kFailedPrecondition, "layer.other_index",
                   "the index of chunks is not the one that there was when the build began");
    return ShareContent(blobs_fd_.get(), out, *index, chunks.placed(), proceed);
  };
  auto shared = share();
  if (shared.ok() || shared.error().code() == Code::kCancelled) return shared;
  const Error& error = shared.error();
  if (error.reason() == "layer.no_links") {
    warnings.Add("content that other layers have is kept once more: " + error.message());
  } else {
    warnings.Add("content that other layers have is kept once more: " + error.ToString());
    log::Warn("layer.not_shared", {{"store", root_}, {"error", error}});
  }
  // What is damaged in a way that shows late; `dsec layer index` fills a new one.
  if (error.reason() == "layer.catalog_damaged") ChunkIndex::Remove(IndexPath());
  return std::optional<SharedContent>();
}

void LayerStore::AddToIndex(const std::string& hex, const ChunkStore& chunks,
                            const std::optional<SharedContent>& shared) const {
  const auto add = [&]() -> Result<void> {
    DSEC_FAULT_POINT("layer.share.before_index");
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    // The hashes are not of this one, nor the numbers of the files.
    if (index->seed() != chunks.seed())
      return Error(Code::kFailedPrecondition, "layer.other_index", "it was made anew meanwhile");
    if (shared) return index->Add(hex, kOwnName, shared->own, shared->links);
    return index->Add(hex, kBlobName, chunks.placed(), {});
  };
  const auto added = add();
  if (!added.ok()) log::Warn("layer.not_indexed", {{"layer", hex}, {"error", added.error()}});
}

void LayerStore::ForgetInIndex(const std::string& hex) const {
  if (::access(IndexPath().c_str(), F_OK) != 0) return;
  const auto forget = [&]() -> Result<void> {
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    return index->ForgetLayer(hex);
  };
  const auto forgot = forget();
  if (!forgot.ok()) log::Warn("layer.chunk_index", {{"store", root_}, {"error", forgot.error()}});
}

void LayerStore::PruneIndex() const {
  if (::access(IndexPath().c_str(), F_OK) != 0) return;
  const auto prune = [&]() -> Result<void> {
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    return index->Prune([&](const ChunkIndex::Place& place) -> Result<bool> {
      DSEC_FAULT_POINT("layer.share.prune");
      const std::string path = place.layer + "/" + place.name;
      struct stat status;
      if (::fstatat(blobs_fd_.get(), path.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
      if (errno == ENOENT || errno == ENOTDIR) return false;
      return StoreError("look for a file of the index");  // says nothing of the file
    });
  };
  const auto pruned = prune();
  if (!pruned.ok()) log::Warn("layer.chunk_index", {{"store", root_}, {"error", pruned.error()}});
}

// Whether the layer is there, with shared content of which the form or the metadata for it are
// wrong.
Result<bool> LayerStore::SharesWrongly(const LayerId& id,
                                       const std::function<bool(uint64_t)>& proceed) const {
  const auto files = OpenLayer(blobs_fd_.get(), id, true);
  if (!files.ok() || !files->form) return false;  // what sizes do not show is for `verify`
  const auto checked = CheckFiles(id, *files, proceed);
  if (checked.ok()) return false;
  if (checked.error().reason() != "layer.corrupt") return checked.error();
  log::Warn("layer.built_anew", {{"layer", id}, {"error", checked.error()}});
  return true;
}

Result<void> LayerStore::CheckSharing() const {
  DSEC_TRY_VOID(Ready());
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  return CheckLinks(work.fd.get());
}

Result<uint64_t> LayerStore::IndexContent(const ProgressFn& progress) {
  DSEC_TRY_VOID(Ready());
  DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
  DSEC_TRY(const auto layers, catalog_->List({}));
  Indexing indexing{*index, {}, {}, {}};
  DSEC_TRY(const auto places, index->Places());
  for (const ChunkIndex::Placement& placed : places) {
    struct stat status;
    const std::string path = placed.place.layer + "/" + placed.place.name;
    if (::fstatat(blobs_fd_.get(), path.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    indexing.files.emplace(std::pair(status.st_dev, status.st_ino), placed.file);
    indexing.places.insert(path);
  }
  std::set<LayerId> read;
  // A file is listed by the layer that has all of it, where that one is there still.
  for (const bool own : {true, false}) {
    uint64_t before = 0;
    for (const LayerInfo& layer : layers) {
      if (layer.blob_bytes == 0 || layer.labels.contains(kCompressedLabel)) continue;
      indexing.proceed = [&](uint64_t bytes) {
        return !progress || progress({Progress::Phase::kRead, read.size(), before + bytes, 0});
      };
      const auto done = IndexLayer(indexing, layer.id, own);
      before += layer.blob_bytes;
      if (done.ok()) {
        if (*done) read.insert(layer.id);
        continue;
      }
      const std::string_view reason = done.error().reason();
      if (done.error().code() == Code::kCancelled || reason.starts_with("layer.catalog"))
        return done.error();
      log::Warn("layer.not_indexed", {{"layer", layer.id}, {"error", done.error()}});
    }
  }
  return read.size();
}

// Those of the layer's files that have no place yet, either what it has of its own or what it
// shares. False: there was none.
Result<bool> LayerStore::IndexLayer(Indexing& indexing, const LayerId& id, bool own) const {
  const std::string hex = HexOf(id);
  DSEC_TRY(const LayerFiles files, OpenLayer(blobs_fd_.get(), id, true));
  std::optional<FormMap> map;
  if (files.form) map.emplace(*files.form);
  bool added = false;
  for (size_t i = 0; i < files.content.size(); ++i) {
    const std::string name = files.form ? files.form->files[i].name : kBlobName;
    if ((name == kBlobName || name == kOwnName) != own) continue;
    if (!indexing.places.insert(hex + "/" + name).second) continue;
    added = true;
    struct stat status;
    if (::fstat(files.content[i].get(), &status) != 0) return StoreError("stat content");
    const std::pair inode(status.st_dev, status.st_ino);
    if (const auto known = indexing.files.find(inode); known != indexing.files.end()) {
      DSEC_TRY_VOID(indexing.index.AddPlace({hex, name}, known->second));
      continue;
    }
    DSEC_TRY(auto meta, ReadMeta(files.meta.get(), files.manifest.meta.size));
    DSEC_TRY(const auto extents, ChunksOf(meta));
    std::vector<BlobExtent> chunks;
    for (const BlobExtent& extent : extents) {
      const auto place =
          map ? map->Find(extent.block) : FormMap::Place{0, extent.block, extent.blocks};
      if (place.file == i && place.blocks >= extent.blocks)
        chunks.push_back({place.block, extent.blocks});
    }
    DSEC_TRY(const auto list,
             ListFile(files.content[i].get(), static_cast<uint64_t>(status.st_size),
                      std::move(chunks), indexing.index.seed(), indexing.proceed));
    DSEC_TRY(const int64_t file, indexing.index.AddFile({hex, name}, list));
    if (file != 0) indexing.files.emplace(inode, file);
  }
  return added;
}

}  // namespace dsec::image
