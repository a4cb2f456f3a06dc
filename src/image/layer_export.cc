// SPDX-License-Identifier: Apache-2.0
#include "image/layer_export.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "image/canonical_blob.h"
#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/layer_files.h"
#include "image/store_work.h"
#include "os/file.h"

namespace dsec::image {
namespace {

// The folder with its files, removed unless it has got its name.
struct Part {
  int dir;
  std::string name;
  ~Part() {
    if (!name.empty()) static_cast<void>(os::RemoveTree(dir, name.c_str()));
  }
};

class Exporter {
 public:
  Exporter(const LayerFiles& files, int folder, const ProgressFn& progress)
      : files_(files), folder_(folder), progress_(progress), buffer_(1 << 20) {}

  Result<void> Run() {
    const Manifest& manifest = files_.manifest;
    const CanonicalBlob meta({files_.meta.get()}, nullptr, manifest.meta.size);
    DSEC_TRY_VOID(Copy(kMetaName, meta, manifest.meta.sha256));
    DSEC_TRY_VOID(Copy(kBlobName, CanonicalBlob(files_), manifest.blob.sha256));
    if (manifest.chunks.bytes != 0) {
      const CanonicalBlob table({files_.table.get()}, nullptr, ChunkTable::FileBytes(manifest));
      DSEC_TRY_VOID(Copy(kTableName, table, manifest.chunks.sha256));
    }
    DSEC_TRY_VOID(os::CreateFile(folder_, kManifestName, manifest.Encode(), 0644));
    DSEC_TRY(const auto fd, os::OpenAt(folder_, kManifestName, O_RDONLY));
    if (::fsync(fd.get()) != 0 || ::fsync(folder_) != 0) return StoreError("fsync an export");
    return Ok();
  }

 private:
  Result<void> Copy(const char* name, const CanonicalBlob& from, const std::string& digest) {
    const os::UniqueFd to(::openat(folder_, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!to.valid()) return StoreError("make a file of an export");
    Sha256 sha;
    for (uint64_t done = 0; done < from.size();) {
      const std::span<uint8_t> part(buffer_.data(),
                                    std::min<uint64_t>(buffer_.size(), from.size() - done));
      DSEC_TRY_VOID(from.ReadAt(done, part));
      sha.Update(part);
      auto wrote =
          os::WriteAll(to.get(), {reinterpret_cast<const char*>(part.data()), part.size()});
      if (!wrote.ok()) {
        errno = wrote.error().sys_errno();
        return StoreError("write an export");
      }
      done += part.size();
      done_ += part.size();
      const uint64_t total = files_.manifest.meta.size + files_.manifest.blob.size;
      if (progress_ && !progress_({Progress::Phase::kRead, files_.info.entries, done_, total}))
        return Error(Code::kCancelled, "layer.cancelled", "cancelled while exporting");
    }
    const std::string found = sha.Finish();
    if (found != digest) return WrongDigest(files_.info.id, name, found, digest);
    if (::fsync(to.get()) != 0) return StoreError("fsync an export");
    return Ok();
  }

  const LayerFiles& files_;
  const int folder_;
  const ProgressFn& progress_;
  std::vector<uint8_t> buffer_;
  uint64_t done_ = 0;
};

}  // namespace

Result<bool> ExportLayer(const LayerStore& store, const LayerId& id, const std::string& to,
                         const ProgressFn& progress) {
  DSEC_TRY(const LayerFiles files, store.OpenFiles(id));
  DSEC_TRY(const auto root, MakeAndOpenDir(AT_FDCWD, to.c_str(), 0755));
  DSEC_TRY(const auto blobs, MakeAndOpenDir(root.get(), "blobs", 0755));
  const std::string hex = HexOf(id);
  if (::faccessat(blobs.get(), hex.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0) return false;
  Part part{blobs.get(), hex + ".part"};
  DSEC_TRY_VOID(os::RemoveTree(blobs.get(), part.name.c_str()));
  DSEC_TRY_VOID(os::MakeDir(blobs.get(), part.name.c_str(), 0755));
  DSEC_TRY(const auto folder, os::OpenAt(blobs.get(), part.name.c_str(), O_RDONLY | O_DIRECTORY));
  DSEC_TRY_VOID(RequireSpace(folder.get(), files.manifest.meta.size + files.manifest.blob.size,
                             "the export"));
  DSEC_TRY_VOID(Exporter(files, folder.get(), progress).Run());
  if (::renameat(blobs.get(), part.name.c_str(), blobs.get(), hex.c_str()) != 0)
    return StoreError("name an export");
  part.name.clear();
  if (::fsync(blobs.get()) != 0) return StoreError("fsync an export");
  return true;
}

}  // namespace dsec::image
