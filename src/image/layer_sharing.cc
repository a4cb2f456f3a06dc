// SPDX-License-Identifier: Apache-2.0
// What keeps content once that several layers of the store have. Nothing of it decides whether a
// layer can be built: content that cannot be shared is kept twice.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/log.h"
#include "image/canonical_blob.h"
#include "image/chunk_index.h"
#include "image/erofs_writer.h"
#include "image/layer_check.h"
#include "image/layer_files.h"
#include "image/layer_store.h"
#include "image/share_content.h"
#include "image/share_meta.h"
#include "image/store_work.h"
#include "image/tree_builder.h"
#include "os/file.h"

namespace dsec::image {

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
  if (error.reason() == "layer.catalog") ChunkIndex::Remove(IndexPath());
  return std::optional<SharedContent>();
}

void LayerStore::AddToIndex(const std::string& hex, const ChunkStore& chunks,
                            const std::optional<SharedContent>& shared) const {
  const auto add = [&]() -> Result<void> {
    DSEC_FAULT_POINT("layer.share.before_index");
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    if (shared) return index->Add(hex, kOwnName, shared->own, shared->links);
    return index->Add(hex, kBlobName, chunks.placed(), {});
  };
  const auto added = add();
  if (!added.ok()) log::Warn("layer.not_indexed", {{"layer", hex}, {"error", added.error()}});
}

void LayerStore::PruneIndex() const {
  if (::access(IndexPath().c_str(), F_OK) != 0) return;
  const auto prune = [&]() -> Result<void> {
    DSEC_TRY(const auto index, ChunkIndex::Open(IndexPath()));
    return index->Prune([&](const ChunkIndex::Place& place) {
      const std::string path = place.layer + "/" + place.name;
      return ::faccessat(blobs_fd_.get(), path.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
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
  uint64_t read = 0, before = 0;
  for (const LayerInfo& layer : layers) {
    DSEC_TRY(const bool known, index->Knows(HexOf(layer.id)));
    if (known || layer.blob_bytes == 0 || layer.labels.contains(kCompressedLabel)) continue;
    auto done = IndexLayer(*index, layer.id, [&](uint64_t bytes) {
      return !progress || progress({Progress::Phase::kRead, read, before + bytes, 0});
    });
    before += layer.blob_bytes;
    if (done.ok()) {
      ++read;
      continue;
    }
    if (done.error().code() == Code::kCancelled || done.error().reason() == "layer.catalog")
      return std::move(done).error();
    log::Warn("layer.not_indexed", {{"layer", layer.id}, {"error", done.error()}});
  }
  return read;
}

// The chunks of the layer's own file. What it has from others is theirs to bring in.
Result<void> LayerStore::IndexLayer(ChunkIndex& index, const LayerId& id,
                                    const std::function<bool(uint64_t)>& proceed) const {
  DSEC_TRY(const LayerFiles files, OpenLayer(blobs_fd_.get(), id, true));
  DSEC_TRY(auto meta, ReadMeta(files.meta.get(), files.manifest.meta.size));
  DSEC_TRY(const auto extents, ChunksOf(meta));
  const CanonicalBlob blob(files);
  std::optional<FormMap> map;
  if (files.form) map.emplace(*files.form);
  std::vector<ChunkStore::Placed> own;
  std::vector<uint8_t> bytes;
  uint32_t next = 0;
  for (const BlobExtent& extent : extents) {
    uint32_t block = extent.block;
    if (map) {
      const FormMap::Place place = map->Find(extent.block);
      if (!files.form->has_own() || place.file != 0) continue;
      block = place.block;
    }
    // A list of chunks that leaves something out says nothing of what follows.
    if (block != next) {
      return Error(Code::kInternal, "layer.corrupt",
                   fmt::format("{}: no file has block {}", id.str(), next));
    }
    bytes.resize(extent.blocks * StoredForm::kBlock);
    DSEC_TRY_VOID(blob.ReadAt(extent.block * StoredForm::kBlock, bytes));
    own.push_back({ChunkStore::HashOf(bytes, index.seed()), block, extent.blocks});
    next += extent.blocks;
    if (!proceed(extent.block * StoredForm::kBlock))
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while reading content");
  }
  return index.Add(HexOf(id), files.form ? kOwnName : kBlobName, own, {});
}

}  // namespace dsec::image
