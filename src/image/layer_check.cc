// SPDX-License-Identifier: Apache-2.0
#include "image/layer_check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "image/canonical_blob.h"
#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
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

// The whole against its digest, and its chunks against their table, if it has one.
Result<void> CheckBlob(const LayerId& id, const LayerFiles& files,
                       const std::function<bool(uint64_t)>& proceed) {
  const Manifest& manifest = files.manifest;
  std::optional<ChunkTable> table;
  if (manifest.chunks.bytes != 0) {
    DSEC_TRY(std::string text, os::ReadAll(files.table.get(), ChunkTable::FileBytes(manifest)));
    DSEC_TRY(table, ChunkTable::Parse(manifest, std::move(text)));
  }
  const CanonicalBlob blob(files);
  BlobHasher hasher(table ? table->chunk_bytes() : kChunkBytes);
  std::vector<uint8_t> buffer(1 << 20);
  for (uint64_t offset = 0; offset < blob.size();) {
    const std::span<uint8_t> part(buffer.data(),
                                  std::min<uint64_t>(buffer.size(), blob.size() - offset));
    DSEC_TRY_VOID(blob.ReadAt(offset, part).Context("{}", id.str()));
    hasher.Update(part);
    offset += part.size();
    if (proceed && !proceed(offset))
      return Error(Code::kCancelled, "layer.cancelled", "cancelled while hashing");
  }
  const auto sums = hasher.Finish();
  if (sums.sha256 != manifest.blob.sha256)
    return WrongDigest(id, kBlobName, sums.sha256, manifest.blob.sha256);
  if (!table || sums.table == table->bytes()) return Ok();
  return Error(Code::kInternal, "layer.corrupt",
               fmt::format("{}: {} is not of its {}", id.str(), kTableName, kBlobName));
}

uint64_t Blocks(const std::string& path) {
  struct stat info;
  return ::lstat(path.c_str(), &info) == 0 ? static_cast<uint64_t>(info.st_blocks) * kBlock : 0;
}

// Of all files below a folder that are nowhere else; 0 if there is none.
Result<uint64_t> BlocksBelow(const std::string& folder) {
  uint64_t blocks = 0;
  std::error_code error;
  for (stdfs::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    struct stat info;
    const std::string path = it->path().string();
    if (::lstat(path.c_str(), &info) != 0 || (S_ISREG(info.st_mode) && info.st_nlink > 1)) continue;
    blocks += static_cast<uint64_t>(info.st_blocks) * kBlock;
  }
  if (!error || error == std::errc::no_such_file_or_directory) return blocks;
  return Error(Code::kInternal, "layer.io", fmt::format("{}: {}", folder, error.message()));
}

// Of the layer's content, what lies in files of other layers; 0 where nothing does, and where it is
// not known because the form is damaged.
uint64_t SharedBytes(const std::string& folder, uint64_t blob_bytes) {
  const auto text =
      os::ReadFile(AT_FDCWD, (folder + "/" + kFormName).c_str(), StoredForm::kMaxText);
  if (!text.ok()) return 0;
  const auto form = StoredForm::Parse(*text, blob_bytes);
  return form.ok() ? form->shared_blocks() * StoredForm::kBlock : 0;
}

// Blocks of files that layers have links to and whose own layer has been removed.
Result<uint64_t> KeptBlocks(const std::string& root) {
  using Inode = std::pair<dev_t, ino_t>;
  std::set<Inode> owned;
  std::map<Inode, uint64_t> linked;
  const std::string blobs = root + "/blobs";
  DSEC_TRY(const auto dir, os::OpenAt(AT_FDCWD, blobs.c_str(), O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto layers, ListNames(dir.get(), UINT64_MAX));
  for (const std::string& layer : layers) {
    struct stat info;
    const auto found = [&](const std::string& name) {
      const std::string path = layer + "/" + name;
      return ::fstatat(dir.get(), path.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0;
    };
    if (found(kBlobName)) {
      owned.emplace(info.st_dev, info.st_ino);
      continue;
    }
    if (found(kOwnName)) owned.emplace(info.st_dev, info.st_ino);
    for (size_t i = 1; i < StoredForm::kMaxFiles && found(StoredForm::SharedName(i)); ++i)
      linked[{info.st_dev, info.st_ino}] = static_cast<uint64_t>(info.st_blocks) * kBlock;
  }
  uint64_t kept = 0;
  for (const auto& [inode, blocks] : linked) {
    if (!owned.contains(inode)) kept += blocks;
  }
  return kept;
}

}  // namespace

Result<LayerInfo> VerifyLayer(const LayerStore& store, std::string_view ref,
                              const ProgressFn& progress) {
  DSEC_TRY(LayerInfo layer, store.Find(ref));
  DSEC_TRY(const LayerFiles files, store.OpenFiles(layer.id));
  const uint64_t total = files.manifest.meta.size + files.manifest.blob.size;
  DSEC_TRY_VOID(CheckFiles(layer.id, files, [&](uint64_t done) {
    return !progress || progress({Progress::Phase::kRead, layer.entries, done, total});
  }));
  return layer;
}

Result<void> CheckFiles(const LayerId& id, const LayerFiles& files,
                        const std::function<bool(uint64_t)>& proceed) {
  uint64_t before = 0;
  const auto step = [&](uint64_t done) { return !proceed || proceed(before + done); };
  DSEC_TRY_VOID(CheckFile(id, kMetaName, files.meta, files.manifest.meta, step));
  if (files.form) DSEC_TRY_VOID(CheckSharedMeta(id, files));
  before = files.manifest.meta.size;
  return CheckBlob(id, files, step);
}

Result<StoreUsage> MeasureStore(const LayerStore& store, const ListFilter& filter) {
  StoreUsage usage;
  DSEC_TRY(auto layers, store.List(filter));
  for (LayerInfo& layer : layers) {
    const std::string folder =
        store.root() + "/blobs/" + layer.id.str().substr(sizeof("sha256:") - 1);
    if (::access(folder.c_str(), F_OK) != 0) continue;
    LayerUsage item;
    item.meta_blocks = Blocks(folder + "/" + kMetaName) + Blocks(folder + "/" + kSharedMetaName);
    item.blob_blocks = Blocks(folder + "/" + kBlobName) + Blocks(folder + "/" + kOwnName);
    item.trace_blocks = Blocks(folder + "/" + kTraceName);
    item.shared_bytes = SharedBytes(folder, layer.blob_bytes);
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
  DSEC_TRY(usage.kept_blocks, KeptBlocks(store.root()));
  return usage;
}

}  // namespace dsec::image
