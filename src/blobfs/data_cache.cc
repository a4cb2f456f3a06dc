// SPDX-License-Identifier: Apache-2.0
#include "blobfs/data_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <tuple>

#include "base/fault.h"
#include "base/id.h"
#include "base/log.h"
#include "image/fs.h"
#include "image/layer_files.h"
#include "os/file.h"

namespace dsec::blobfs {
namespace {

constexpr std::string_view kNewPrefix = "new-";
constexpr char kDataName[] = "data";
constexpr size_t kMaxManifest = 1 << 20;
constexpr size_t kMaxTable = 64 << 20;
constexpr auto kFullPause = std::chrono::seconds(10);
constexpr uint64_t kBlock = 4096;  // the alignment that O_DIRECT takes everywhere
constexpr uint64_t kStatBlock = 512;

uint64_t RoundUp(uint64_t size) { return (size + kBlock - 1) / kBlock * kBlock; }

// Past the page cache, which would hold each page twice; tmpfs before Linux 6.6 cannot.
Result<os::UniqueFd> OpenData(int folder) {
  auto fd = os::OpenAt(folder, kDataName, O_RDWR | O_CREAT | O_NOFOLLOW | O_DIRECT, 0600);
  if (!fd.ok() && fd.error().sys_errno() == EINVAL)
    fd = os::OpenAt(folder, kDataName, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
  return fd;
}

}  // namespace

Result<image::ChunkTable> ParseLayerProof(const std::string& manifest, std::string table) {
  DSEC_TRY(const auto parsed, image::Manifest::Parse(manifest));
  return image::ChunkTable::Parse(parsed, std::move(table));
}

Result<std::unique_ptr<DataCache>> DataCache::Open(const std::string& dir, uint64_t max_bytes,
                                                   bool keep_proofs, Counts& counts,
                                                   ParseProof parse) {
  std::unique_ptr<DataCache> cache(new DataCache(max_bytes, keep_proofs, counts, std::move(parse)));
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(dir).parent_path(), error);
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST) return image::StoreError("make " + dir);
  DSEC_TRY(cache->dir_, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  const int fd = cache->dir_.get();
  DSEC_TRY(const auto names, image::ListNames(fd, UINT64_MAX));
  for (const std::string& name : names) {
    if (name.starts_with(kNewPrefix)) DSEC_TRY_VOID(os::RemoveTree(fd, name.c_str()));
    if (!image::IsSha256Hex(name)) continue;
    struct stat status;
    Cold cold;
    if (::fstatat(fd, (name + "/" + kDataName).c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0)
      cold = {static_cast<uint64_t>(status.st_blocks) * kStatBlock, status.st_mtim};
    cache->bytes_ += cold.bytes;
    cache->cold_.emplace(name, cold);
  }
  const std::lock_guard lock(cache->mutex_);
  cache->Account(0);
  cache->MakeRoom(0);
  return cache;
}

DataCache::~DataCache() = default;

void DataCache::Account(int64_t change) {
  bytes_ += static_cast<uint64_t>(change);
  counts_.cache_bytes = bytes_;
}

std::optional<DataCache::Proof> DataCache::ReadProof(const std::string& hex) {
  const auto read = [&]() -> Result<Proof> {
    DSEC_TRY(const std::string text,
             os::ReadFile(dir_.get(), (hex + "/" + image::kManifestName).c_str(), kMaxManifest));
    if (image::Sha256Hex(text) != hex)
      return Error(Code::kInternal, "layer.corrupt", "the local manifest has not its digest");
    DSEC_TRY(std::string table,
             os::ReadFile(dir_.get(), (hex + "/" + image::kTableName).c_str(), kMaxTable));
    DSEC_TRY(auto parsed, parse_(text, std::move(table)));
    return Proof{text, std::move(parsed)};
  };
  auto proof = read();
  if (proof.ok()) return *std::move(proof);
  if (proof.error().sys_errno() != ENOENT)
    log::Warn("blobfs.proof_damaged", {{"layer", hex}, {"error", proof.error()}});
  return std::nullopt;
}

Result<void> DataCache::WriteProof(const std::string& hex, const Proof& proof) {
  const std::string fresh = std::string(kNewPrefix) + NewUlid(Clock::System());
  DSEC_TRY_VOID(os::MakeDir(dir_.get(), fresh.c_str(), 0700));
  const auto write = [&]() -> Result<void> {
    DSEC_TRY(const auto folder, os::OpenAt(dir_.get(), fresh.c_str(), O_RDONLY | O_DIRECTORY));
    DSEC_TRY_VOID(os::CreateFile(folder.get(), image::kManifestName, proof.manifest, 0600));
    DSEC_TRY_VOID(os::CreateFile(folder.get(), image::kTableName, proof.table.bytes(), 0600));
    DSEC_FAULT_POINT("blobfs.proof.before_rename");
    // One that is damaged is in the way; its chunks go with it.
    auto removed = os::RemoveTree(dir_.get(), hex.c_str());
    if (!removed.ok() && removed.error().sys_errno() != ENOENT) return removed;
    if (::renameat(dir_.get(), fresh.c_str(), dir_.get(), hex.c_str()) != 0)
      return image::StoreError("publish the local proof of a layer");
    return Ok();
  };
  auto written = write();
  if (!written.ok()) {
    static_cast<void>(os::RemoveTree(dir_.get(), fresh.c_str()));
    return written;
  }
  const std::lock_guard lock(mutex_);
  const auto cold = cold_.find(hex);
  if (cold != cold_.end()) {
    Account(-static_cast<int64_t>(cold->second.bytes));
    cold->second = {};
  } else if (!used_.contains(hex)) {
    cold_.emplace(hex, Cold());
  }
  return Ok();
}

std::vector<std::string> DataCache::Layers() const {
  std::vector<std::string> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [hex, cold] : cold_) all.push_back(hex);
  for (const auto& [hex, layer] : used_) all.push_back(hex);
  return all;
}

Result<std::shared_ptr<CachedLayer>> DataCache::Use(const std::string& hex,
                                                    const image::ChunkTable& table) {
  const std::lock_guard lock(mutex_);
  if (const auto found = used_.find(hex); found != used_.end()) return found->second;
  DSEC_TRY(const auto folder,
           os::OpenAt(dir_.get(), hex.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  auto layer = std::make_shared<CachedLayer>();
  DSEC_TRY(layer->data_, OpenData(folder.get()));
  layer->hex_ = hex;
  layer->chunk_bytes_ = table.chunk_bytes();
  layer->blob_bytes_ = table.blob_bytes();
  layer->places_.resize(table.count());
  // Whole blocks, which O_DIRECT asks for at the end of the file, too.
  if (::ftruncate(layer->data_.get(), static_cast<off_t>(RoundUp(layer->blob_bytes_))) != 0)
    return image::StoreError("set the size of a local copy");
  static_cast<void>(::futimens(layer->data_.get(), nullptr));
  if (const auto cold = cold_.find(hex); cold != cold_.end()) {
    Account(-static_cast<int64_t>(cold->second.bytes));
    cold_.erase(cold);
  }
  FindChunks(*layer);
  used_.emplace(hex, layer);
  return layer;
}

// A chunk that begins and ends in data is there; one with a hole in it fails its digest.
void DataCache::FindChunks(CachedLayer& layer) {
  const int fd = layer.data_.get();
  const auto end = static_cast<off_t>(layer.blob_bytes_);
  for (off_t at = 0; at < end;) {
    const off_t begin = ::lseek(fd, at, SEEK_DATA);
    if (begin < 0 || begin >= end) return;
    const off_t hole = ::lseek(fd, begin, SEEK_HOLE);
    const auto stop = static_cast<uint64_t>(hole < 0 ? end : std::min(hole, end));
    for (uint64_t chunk = static_cast<uint64_t>(begin) / layer.chunk_bytes_;
         chunk * layer.chunk_bytes_ < stop; ++chunk) {
      if (layer.places_[chunk]) continue;
      order_.push_back({&layer, chunk, ++writes_});
      layer.places_[chunk] = std::prev(order_.end());
      Account(layer.chunk_bytes_);
    }
    at = static_cast<off_t>(stop);
  }
}

bool DataCache::Has(const CachedLayer& layer, uint64_t chunk) const {
  const std::lock_guard lock(mutex_);
  return layer.places_[chunk].has_value();
}

uint64_t DataCache::Read(CachedLayer& layer, uint64_t chunk, std::span<uint8_t> out) {
  uint64_t written = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!layer.places_[chunk]) return 0;
    order_.splice(order_.begin(), order_, *layer.places_[chunk]);
    written = order_.front().written;
  }
  const uint64_t want = RoundUp(out.size());  // the buffer is that large
  for (uint64_t done = 0; done < want;) {
    const ssize_t got = ::pread(layer.data_.get(), out.data() + done, want - done,
                                static_cast<off_t>(chunk * layer.chunk_bytes_ + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {  // the disk cannot read it any more
      Drop(layer, chunk, written);
      return 0;
    }
    done += static_cast<uint64_t>(got);
  }
  return written;
}

void DataCache::Write(CachedLayer& layer, uint64_t chunk, std::span<const uint8_t> bytes) {
  {
    const std::lock_guard lock(mutex_);
    // Nor by two at once: it must not be cut away under one of them.
    if (layer.places_[chunk] || writing_.contains({&layer, chunk})) return;
    if (layer.chunk_bytes_ > max_bytes_ || Clock::System().Mono() < full_until_) {
      ++counts_.not_kept;
      return;
    }
    MakeRoom(layer.chunk_bytes_);
    if (bytes_ + layer.chunk_bytes_ > max_bytes_) {  // others are being written
      ++counts_.not_kept;
      return;
    }
    Account(layer.chunk_bytes_);  // its room, from now on
    writing_.emplace(&layer, chunk);
  }
  const uint64_t want = RoundUp(bytes.size());
  const auto fault = fault::Point("blobfs.chunk.before_write");
  int error = fault.ok() ? 0 : fault.error().sys_errno();
  for (uint64_t done = 0; done < want && error == 0;) {
    const ssize_t put = ::pwrite(layer.data_.get(), bytes.data() + done, want - done,
                                 static_cast<off_t>(chunk * layer.chunk_bytes_ + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) error = put == 0 ? EIO : errno;
    if (put > 0) done += static_cast<uint64_t>(put);
  }
  static_cast<void>(fault::Point("blobfs.chunk.after_write"));
  const std::lock_guard lock(mutex_);
  writing_.erase({&layer, chunk});
  if (error != 0) {
    Account(-static_cast<int64_t>(layer.chunk_bytes_));
    Forget(layer, chunk);
    ++counts_.not_kept;
    full_until_ = Clock::System().Mono() + kFullPause;
    log::Warn("blobfs.not_kept", {{"layer", layer.hex_}, {"error", ::strerror(error)}});
    return;
  }
  order_.push_front({&layer, chunk, ++writes_});
  layer.places_[chunk] = order_.begin();
}

bool DataCache::Drop(CachedLayer& layer, uint64_t chunk, uint64_t read) {
  const std::lock_guard lock(mutex_);
  if (!layer.places_[chunk] || (*layer.places_[chunk])->written != read) return false;
  Forget(layer, chunk);
  return true;
}

// Makes a hole of it.
void DataCache::Forget(CachedLayer& layer, uint64_t chunk) {
  if (layer.places_[chunk]) {
    order_.erase(*layer.places_[chunk]);
    layer.places_[chunk].reset();
    Account(-static_cast<int64_t>(layer.chunk_bytes_));
  }
  static_cast<void>(::fallocate(layer.data_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                static_cast<off_t>(chunk * layer.chunk_bytes_),
                                layer.chunk_bytes_));
}

void DataCache::MakeRoom(uint64_t bytes) {
  while (bytes_ + bytes > max_bytes_ &&
         std::ranges::any_of(cold_, [](const auto& item) { return item.second.bytes > 0; }))
    EvictCold();
  while (bytes_ + bytes > max_bytes_ && !order_.empty()) {
    CachedLayer* const layer = order_.back().layer;
    const uint64_t chunk = order_.back().chunk;
    const std::string hex = layer->hex_;
    Forget(*layer, chunk);
    ++counts_.evicted;
    RemoveIfUnused(hex);
  }
}

void DataCache::EvictCold() {
  const auto oldest = std::ranges::min_element(cold_, {}, [](const auto& item) {
    // Without content there is nothing to win.
    return std::tuple(item.second.bytes == 0, item.second.used.tv_sec, item.second.used.tv_nsec);
  });
  Account(-static_cast<int64_t>(oldest->second.bytes));
  ++counts_.evicted;
  if (keep_proofs_) {
    static_cast<void>(::unlinkat(dir_.get(), (oldest->first + "/" + kDataName).c_str(), 0));
    oldest->second = {};
    return;
  }
  auto removed = os::RemoveTree(dir_.get(), oldest->first.c_str());
  if (!removed.ok())
    log::Warn("blobfs.copy_stays", {{"layer", oldest->first}, {"error", removed.error()}});
  cold_.erase(oldest);
}

// Nobody serves it and its last chunk has gone.
void DataCache::RemoveIfUnused(const std::string& hex) {
  const auto found = used_.find(hex);
  if (keep_proofs_ || found == used_.end() || found->second.use_count() > 1) return;
  const auto& places = found->second->places_;
  if (std::ranges::any_of(places, [](const auto& place) { return place.has_value(); })) return;
  used_.erase(found);
  static_cast<void>(os::RemoveTree(dir_.get(), hex.c_str()));
}

}  // namespace dsec::blobfs
