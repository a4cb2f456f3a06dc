// SPDX-License-Identifier: Apache-2.0
#include "image/layer_check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/store_work.h"
#include "os/file.h"

namespace dsec::image {
namespace {

namespace stdfs = std::filesystem;

constexpr uint64_t kBlock = 512;  // the unit of st_blocks (stat(2))

Result<void> CheckFile(const LayerId& id, const char* name, const os::UniqueFd& file,
                       const FileDigest& expected, const std::function<bool(uint64_t)>& proceed) {
  DSEC_TRY(const std::string found, Sha256File(file.get(), proceed));
  if (found == expected.sha256) return Ok();
  return WrongDigest(id, name, found, expected.sha256);
}

// The whole against its digest, and its chunks against their table.
Result<void> CheckBlob(const LayerId& id, const LayerFiles& files,
                       const std::function<bool(uint64_t)>& proceed) {
  if (files.manifest.chunks.bytes == 0)
    return CheckFile(id, "data.blob", files.blob, files.manifest.blob, proceed);
  DSEC_TRY(std::string text, os::ReadAll(files.table.get(), ChunkTable::FileBytes(files.manifest)));
  DSEC_TRY(const auto table, ChunkTable::Parse(files.manifest, std::move(text)));
  BlobHasher hasher(table.chunk_bytes());
  std::vector<uint8_t> buffer(1 << 20);
  for (uint64_t offset = 0;;) {
    const ssize_t got =
        ::pread(files.blob.get(), buffer.data(), buffer.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return os::ErrnoError("layer.io", "read a file to hash it");
    if (got == 0) break;
    hasher.Update({buffer.data(), static_cast<size_t>(got)});
    offset += static_cast<uint64_t>(got);
    if (proceed && !proceed(offset))
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while hashing");
  }
  const auto sums = hasher.Finish();
  if (sums.sha256 != files.manifest.blob.sha256)
    return WrongDigest(id, "data.blob", sums.sha256, files.manifest.blob.sha256);
  if (sums.table == table.bytes()) return Ok();
  return Error(Code::kInternal, "layer.corrupt",
               fmt::format("{}: {} is not of its data.blob", id.str(), kTableName));
}

uint64_t Blocks(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 ? static_cast<uint64_t>(info.st_blocks) * kBlock : 0;
}

// Of all files below a folder; 0 if there is none.
Result<uint64_t> BlocksBelow(const std::string& folder) {
  uint64_t blocks = 0;
  std::error_code error;
  for (stdfs::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    blocks += Blocks(it->path().string());
  }
  if (!error || error == std::errc::no_such_file_or_directory) return blocks;
  return Error(Code::kInternal, "layer.io", fmt::format("{}: {}", folder, error.message()));
}

}  // namespace

Result<LayerInfo> VerifyLayer(const LayerStore& store, std::string_view ref,
                              const ProgressFn& progress) {
  DSEC_TRY(LayerInfo layer, store.Find(ref));
  DSEC_TRY(LayerFiles files, store.OpenFiles(layer.id));
  const uint64_t total = files.manifest.meta.size + files.manifest.blob.size;
  uint64_t before = 0;
  const auto proceed = [&](uint64_t done) {
    return !progress || progress({Progress::Phase::kRead, layer.entries, before + done, total});
  };
  DSEC_TRY_VOID(CheckFile(layer.id, "meta.erofs", files.meta, files.manifest.meta, proceed));
  before = files.manifest.meta.size;
  DSEC_TRY_VOID(CheckBlob(layer.id, files, proceed));
  return layer;
}

Result<StoreUsage> MeasureStore(const LayerStore& store, const ListFilter& filter) {
  StoreUsage usage;
  DSEC_TRY(auto layers, store.List(filter));
  for (LayerInfo& layer : layers) {
    const std::string folder =
        store.root() + "/blobs/" + layer.id.str().substr(sizeof("sha256:") - 1);
    if (::access(folder.c_str(), F_OK) != 0) continue;
    LayerUsage item;
    item.meta_blocks = Blocks(folder + "/meta.erofs");
    item.blob_blocks = Blocks(folder + "/data.blob");
    item.trace_blocks = Blocks(folder + "/" + kTraceName);
    item.unnamed = layer.names.empty();
    item.layer = std::move(layer);
    usage.layers.push_back(std::move(item));
  }
  std::ranges::sort(usage.layers, [](const LayerUsage& a, const LayerUsage& b) {
    const uint64_t left = a.meta_blocks + a.blob_blocks, right = b.meta_blocks + b.blob_blocks;
    return left != right ? left > right : a.layer.id < b.layer.id;
  });
  DSEC_TRY(usage.work_blocks, BlocksBelow(store.root() + "/tmp"));
  DSEC_TRY(usage.condemned_blocks, BlocksBelow(store.root() + "/" + kCondemnedName));
  return usage;
}

}  // namespace dsec::image
