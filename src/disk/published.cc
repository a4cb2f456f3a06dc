// SPDX-License-Identifier: Apache-2.0
#include "disk/published.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/fault.h"
#include "base/id.h"
#include "base/log.h"
#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/layer_files.h"
#include "os/file.h"

namespace dsec::disk {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;
constexpr size_t kMaxManifest = 16 << 10;
constexpr size_t kMaxTable = 64 << 20;  // of 512 GiB
constexpr size_t kKept = 256;           // layers that nobody uses
constexpr uint64_t kCopyBytes = 1 << 20;

Error Corrupt(std::string_view hex, std::string_view what) {
  return Error(Code::kInternal, "layer.corrupt", fmt::format("disk layer {}: {}", hex, what));
}

Result<image::ChunkTable> ParseTable(const std::string& manifest, std::string table) {
  DSEC_TRY(const auto parsed, PublishedManifest::Parse(manifest));
  return image::ChunkTable::Parse(parsed.bytes, {parsed.chunk_bytes, parsed.chunks_sha256},
                                  parsed.uuid, std::move(table));
}

class PublishedFile : public LayerFile {
 public:
  PublishedFile(blobfs::ChunkLoader& loader, std::shared_ptr<blobfs::Layer> layer)
      : loader_(loader), layer_(std::move(layer)) {}
  uint64_t size() const override { return layer_->proof.table.blob_bytes(); }
  void Read(uint64_t offset, std::span<uint8_t> out, Done done) override {
    if (out.empty()) return done(Ok());
    if (offset > size() || out.size() > size() - offset)
      return done(Corrupt(layer_->hex, fmt::format("ends before byte {}", offset + out.size())));
    loader_.Read(layer_, offset, static_cast<uint32_t>(out.size()),
                 [out, done = std::move(done)](Result<blobfs::ChunkLoader::Pieces> pieces) {
                   if (!pieces.ok()) return done(std::move(pieces).error());
                   auto at = out.begin();
                   for (const auto& piece : *pieces) at = std::ranges::copy(piece.bytes, at).out;
                   done(Ok());
                 });
  }

 private:
  blobfs::ChunkLoader& loader_;
  const std::shared_ptr<blobfs::Layer> layer_;
};

Result<void> SyncFolder(const std::string& path) {
  DSEC_TRY(const auto folder, os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY));
  if (::fsync(folder.get()) != 0) return DiskError("sync " + path);
  return Ok();
}

Result<void> CreateSynced(const std::string& path, std::string_view text) {
  DSEC_TRY(auto file,
           os::OpenAt(AT_FDCWD, path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  DSEC_TRY_VOID(os::WriteAll(file.get(), text));
  if (::fsync(file.get()) != 0) return DiskError("sync " + path);
  return Ok();
}

}  // namespace

std::string PublishedManifest::Encode() const {
  return json{{"blob",
               {{"chunks", {{"sha256", chunks_sha256}, {"size", chunk_bytes}}},
                {"sha256", sha256},
                {"size", bytes}}},
              {"format", kFormat},
              {"kind", "disk"},
              {"parent_uuid", parent_uuid},
              {"uuid", uuid},
              {"virtual_size", virtual_bytes}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

Result<PublishedManifest> PublishedManifest::Parse(const std::string& text) {
  const json object = json::parse(text, nullptr, false);
  const Error bad = Corrupt("?", "its manifest is not in canonical form");
  PublishedManifest manifest;
  try {
    const json& blob = object.at("blob");
    if (object.at("format") != kFormat || object.at("kind") != "disk") return bad;
    manifest.bytes = blob.at("size").get<uint64_t>();
    manifest.sha256 = blob.at("sha256").get<std::string>();
    manifest.chunk_bytes = blob.at("chunks").at("size").get<uint32_t>();
    manifest.chunks_sha256 = blob.at("chunks").at("sha256").get<std::string>();
    manifest.virtual_bytes = object.at("virtual_size").get<uint64_t>();
    manifest.uuid = object.at("uuid").get<std::string>();
    manifest.parent_uuid = object.at("parent_uuid").get<std::string>();
  } catch (const json::exception&) {
    return bad;
  }
  if (manifest.chunk_bytes != image::kChunkBytes || !image::IsSha256Hex(manifest.sha256) ||
      !image::IsSha256Hex(manifest.chunks_sha256) || !CheckDiskBytes(manifest.virtual_bytes).ok() ||
      manifest.Encode() != text)
    return bad;
  return manifest;
}

Result<std::string> Publish(const std::string& root, const std::string& layer,
                            const std::function<bool(uint64_t)>& proceed) {
  DSEC_TRY(const auto opened, OpenLayerAt(AT_FDCWD, layer));
  DSEC_TRY([[maybe_unused]] const auto index, opened->ReadIndex());
  const std::string blobs = root + "/blobs";
  const std::string work = fmt::format("{}/new-{}", blobs, NewUlid(Clock::System()));
  std::error_code error;
  std::filesystem::create_directories(blobs, error);
  if (::mkdir(work.c_str(), 0700) != 0) return DiskError("make " + work);
  const auto publish = [&]() -> Result<std::string> {
    PublishedManifest manifest;
    manifest.bytes = opened->file->size();
    manifest.chunk_bytes = image::kChunkBytes;
    manifest.virtual_bytes = opened->info.virtual_bytes;
    manifest.uuid = opened->info.uuid;
    manifest.parent_uuid = opened->info.parent_uuid;
    image::BlobHasher hasher(image::kChunkBytes);
    {
      DSEC_TRY(auto file, os::OpenAt(AT_FDCWD, (work + "/" + kLayerName).c_str(),
                                     O_WRONLY | O_CREAT | O_EXCL, 0600));
      std::vector<uint8_t> buffer(std::min<uint64_t>(kCopyBytes, manifest.bytes));
      for (uint64_t done = 0; done < manifest.bytes;) {
        const auto part =
            std::span(buffer).first(std::min<uint64_t>(buffer.size(), manifest.bytes - done));
        DSEC_TRY_VOID(opened->file->ReadNow(done, part));
        hasher.Update(part);
        DSEC_TRY_VOID(WriteFully(file.get(), done, part));
        done += part.size();
        if (proceed && !proceed(done))
          return Error(Code::kCancelled, "disk.cancelled", "stopped on request");
      }
      if (::fsync(file.get()) != 0) return DiskError("sync a published layer");
    }
    const auto sums = hasher.Finish();
    manifest.sha256 = sums.sha256;
    manifest.chunks_sha256 = image::Sha256Hex(sums.table);
    const std::string text = manifest.Encode();
    std::string hex = image::Sha256Hex(text);
    DSEC_TRY_VOID(CreateSynced(work + "/" + image::kTableName, sums.table));
    DSEC_TRY_VOID(CreateSynced(work + "/" + image::kManifestName, text));
    DSEC_TRY_VOID(SyncFolder(work));
    DSEC_FAULT_POINT("disk.publish.before_rename");
    if (::rename(work.c_str(), (blobs + "/" + hex).c_str()) != 0) {
      if (errno != ENOTEMPTY && errno != EEXIST) return DiskError("publish a layer");
      static_cast<void>(os::RemoveTree(AT_FDCWD, work.c_str()));  // it is there already
    }
    DSEC_TRY_VOID(SyncFolder(blobs));
    return hex;
  };
  auto published = publish();
  if (!published.ok()) static_cast<void>(os::RemoveTree(AT_FDCWD, work.c_str()));
  return published;
}

Result<uint64_t> VerifyLayer(const Layer& layer) {
  DSEC_TRY(const auto index, layer.ReadIndex());
  std::vector<uint8_t> buffer(kCopyBytes);
  uint64_t bytes = 0;
  for (const Extent& extent : index) {
    if (extent.zero) continue;
    const uint64_t size = uint64_t{extent.count} * kSectorBytes;
    for (uint64_t done = 0; done < size;) {
      const auto part = std::span(buffer).first(std::min<uint64_t>(buffer.size(), size - done));
      DSEC_TRY_VOID(layer.file->ReadNow(extent.place * kSectorBytes + done, part));
      done += part.size();
    }
    bytes += size;
  }
  return bytes;
}

Result<PublishedManifest> VerifyPublished(const std::string& root, const std::string& hex) {
  if (!image::IsSha256Hex(hex)) {
    return Error(Code::kInvalidArgument, "disk.bad_id",
                 fmt::format("\"{}\" is not 64 lower-case hex digits", hex))
        .WithField("layer");
  }
  const auto source = blobfs::FolderSource(root);
  DSEC_TRY(const std::string text, source->ReadAll(hex, image::kManifestName, kMaxManifest));
  if (image::Sha256Hex(text) != hex) return Corrupt(hex, "the manifest does not have this digest");
  DSEC_TRY(auto manifest, PublishedManifest::Parse(text));
  DSEC_TRY(std::string bytes, source->ReadAll(hex, image::kTableName, kMaxTable));
  DSEC_TRY(const auto table, ParseTable(text, std::move(bytes)));
  const auto reader = source->Open(hex, kLayerName, manifest.bytes);
  std::vector<uint8_t> buffer(table.chunk_bytes());
  image::Sha256 whole;
  for (uint64_t chunk = 0; chunk < table.count(); ++chunk) {
    const auto part = std::span(buffer).first(table.SizeOf(chunk));
    DSEC_TRY_VOID(reader->ReadAt(table.OffsetOf(chunk), part));
    if (!table.Matches(chunk, part))
      return Corrupt(hex, fmt::format("chunk {} has a wrong digest", chunk));
    whole.Update(part);
  }
  if (whole.Finish() != manifest.sha256) return Corrupt(hex, "the layer has a wrong digest");
  DSEC_TRY(const auto layer,
           OpenLayerAt(AT_FDCWD, fmt::format("{}/blobs/{}/{}", root, hex, kLayerName)));
  DSEC_TRY_VOID(VerifyLayer(*layer));
  if (layer->info.uuid != manifest.uuid || layer->info.parent_uuid != manifest.parent_uuid ||
      layer->info.virtual_bytes != manifest.virtual_bytes)
    return Corrupt(hex, "the manifest says something else than the layer");
  return manifest;
}

Result<std::unique_ptr<PublishedStore>> PublishedStore::Open(
    Options options, std::unique_ptr<blobfs::LayerSource> source) {
  std::unique_ptr<PublishedStore> store(new PublishedStore(std::move(options)));
  const Options& set = store->options_;
  store->source_ = source != nullptr ? std::move(source) : blobfs::FolderSource(set.root);
  if (!set.cache_dir.empty()) {
    DSEC_TRY(store->cache_, blobfs::DataCache::Open(set.cache_dir, set.cache_bytes, set.keep_proofs,
                                                    store->counts_, ParseTable));
  }
  store->loader_ = std::make_unique<blobfs::ChunkLoader>(
      store->cache_.get(), set.loader, store->counts_, [](const std::string&, uint64_t) {});
  return store;
}

PublishedStore::~PublishedStore() { source_->Stop(); }

Result<blobfs::DataCache::Proof> PublishedStore::Fetch(const std::string& hex) {
  DSEC_TRY(const std::string text, source_->ReadAll(hex, image::kManifestName, kMaxManifest));
  if (image::Sha256Hex(text) != hex) return Corrupt(hex, "the manifest does not have this digest");
  DSEC_TRY(std::string bytes, source_->ReadAll(hex, image::kTableName, kMaxTable));
  DSEC_TRY(auto table, ParseTable(text, std::move(bytes)));
  return blobfs::DataCache::Proof{text, std::move(table)};
}

Result<std::shared_ptr<const Layer>> PublishedStore::Find(const std::string& hex) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = known_.find(hex); known != known_.end()) return known->second;
  }
  std::optional<blobfs::DataCache::Proof> proof;
  if (cache_ != nullptr) proof = cache_->ReadProof(hex);
  std::shared_ptr<blobfs::CachedLayer> local;
  const bool had = proof.has_value();
  if (!had) {
    DSEC_TRY(proof, Fetch(hex));
  }
  if (cache_ != nullptr) {
    const auto keep = [&]() -> Result<void> {
      if (!had) DSEC_TRY_VOID(cache_->WriteProof(hex, *proof));
      DSEC_TRY(local, cache_->Use(hex, proof->table));
      return Ok();
    };
    if (const auto kept = keep(); !kept.ok())
      log::Warn("disk.no_local_copy", {{"layer", hex}, {"error", kept.error()}});
  }
  auto reader = source_->Open(hex, kLayerName, proof->table.blob_bytes());
  auto served =
      std::make_shared<blobfs::Layer>(hex, *std::move(proof), std::move(local), std::move(reader));
  DSEC_TRY(auto layer, OpenLayer(std::make_shared<PublishedFile>(*loader_, std::move(served)))
                           .Context("published layer {}", hex));
  const std::lock_guard lock(mutex_);
  if (known_.size() >= kKept)
    std::erase_if(known_, [](const auto& item) { return item.second.use_count() == 1; });
  known_[hex] = layer;
  return layer;
}

}  // namespace dsec::disk
