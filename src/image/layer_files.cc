// SPDX-License-Identifier: Apache-2.0
#include "image/layer_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/root_calls.h"
#include "image/share_meta.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kMaxManifest = 1 << 20;

Error Corrupt(const LayerId& id, std::string_view what) {
  return Error(Code::kInternal, "layer.corrupt", fmt::format("{}: {}", id.str(), what));
}

Result<os::UniqueFd> OpenOnRoot(int dirfd, const char* name, int flags) {
  auto fd = os::OpenAt(dirfd, name, flags | O_NOFOLLOW);
  if (!fd.ok()) return RootError(std::move(fd).error());
  return fd;
}

}  // namespace

std::string HexOf(const LayerId& id) { return id.str().substr(sizeof("sha256:") - 1); }

LayerInfo InfoOf(const LayerId& id, const Manifest& manifest) {
  LayerInfo info;
  info.id = id;
  info.kind = manifest.kind;
  info.meta_bytes = manifest.meta.size;
  info.blob_bytes = manifest.blob.size;
  info.config = manifest.config;
  info.lower = manifest.lower;
  return info;
}

Error WrongDigest(const LayerId& id, std::string_view file, std::string_view found,
                  std::string_view expected) {
  return Corrupt(id, fmt::format("{} has the digest {}, not {}", file, found, expected));
}

std::vector<int> ContentOf(const LayerFiles& files) {
  std::vector<int> content;
  for (const os::UniqueFd& file : files.content) content.push_back(file.get());
  return content;
}

Result<std::optional<StoredForm>> ReadForm(int folder, uint64_t blob_bytes) {
  auto file = OpenOnRoot(folder, kFormName, O_RDONLY);
  if (!file.ok()) {
    if (file.error().sys_errno() == ENOENT) return std::optional<StoredForm>();
    return std::move(file).error();
  }
  auto text = os::ReadAll(file->get(), StoredForm::kMaxText);
  if (!text.ok() && text.error().reason() == "os.file_too_large")
    return Error(Code::kInternal, "layer.corrupt", text.error().message());
  if (!text.ok()) return RootError(std::move(text).error());
  DSEC_TRY(auto form, StoredForm::Parse(*text, blob_bytes));
  return std::optional(std::move(form));
}

Result<void> CheckSharedMeta(const LayerId& id, const LayerFiles& files) {
  const MetaTurn turn;
  DSEC_TRY(auto made, ReadMeta(files.meta.get(), files.manifest.meta.size));
  DSEC_TRY_VOID(ShareMeta(made, *files.form));
  std::vector<uint8_t> found(1 << 20);
  bool equal = true;
  for (uint64_t done = 0; equal && done < made.size();) {
    const size_t step = std::min<uint64_t>(found.size(), made.size() - done);
    const ssize_t got =
        ::pread(files.shared_meta.get(), found.data(), step, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return RootError(os::ErrnoError("layer.io", "read the shared metadata"));
    equal = got > 0 && std::memcmp(found.data(), made.data() + done, static_cast<size_t>(got)) == 0;
    done += static_cast<uint64_t>(got);
  }
  if (equal) return Ok();
  return Corrupt(
      id, fmt::format("{} is not what {} makes of {}", kSharedMetaName, kFormName, kMetaName));
}

Result<LayerFiles> OpenLayer(int blobs, const LayerId& id, bool with_meta) {
  const std::string hex = HexOf(id);
  const Error gone(Code::kNotFound, "layer.not_found",
                   fmt::format("the files of {} are missing", id.str()));
  auto dir = OpenOnRoot(blobs, hex.c_str(), O_RDONLY | O_DIRECTORY);
  if (!dir.ok()) return dir.error().sys_errno() == ENOENT ? gone : std::move(dir).error();
  LayerFiles files;
  DSEC_TRY(files.lock, OpenOnRoot(dir->get(), kManifestName, O_RDONLY));
  if (::flock(files.lock.get(), LOCK_SH | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return gone;  // is being removed
    return RootError(os::ErrnoError("layer.io", "lock a layer"));
  }
  // Removed between the open and the lock?
  struct stat held;
  struct stat present;
  const std::string path = hex + "/" + kManifestName;
  if (::fstat(files.lock.get(), &held) != 0 ||
      ::fstatat(blobs, path.c_str(), &present, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return gone;
    return RootError(os::ErrnoError("layer.io", "stat a layer"));
  }
  if (held.st_ino != present.st_ino) return gone;
  auto text = os::ReadAll(files.lock.get(), kMaxManifest);
  if (!text.ok()) return RootError(std::move(text).error());
  if (Sha256Hex(*text) != hex) return Corrupt(id, "the manifest does not have this digest");
  DSEC_TRY(files.manifest, Manifest::Parse(*text));
  const auto open = [&](const char* file, uint64_t size, os::UniqueFd& fd) -> Result<void> {
    DSEC_TRY(fd, OpenOnRoot(dir->get(), file, O_RDONLY));
    struct stat status;
    if (::fstat(fd.get(), &status) != 0)
      return RootError(os::ErrnoError("layer.io", "stat a layer's file"));
    if (static_cast<uint64_t>(status.st_size) != size) {
      return Corrupt(id, fmt::format("{} has {} bytes, not {}", file, status.st_size, size));
    }
    return Ok();
  };
  if (with_meta) DSEC_TRY_VOID(open(kMetaName, files.manifest.meta.size, files.meta));
  if (with_meta && files.manifest.chunks.bytes != 0)
    DSEC_TRY_VOID(open(kTableName, ChunkTable::FileBytes(files.manifest), files.table));
  files.first_name = kBlobName;
  os::UniqueFd blob;
  auto whole = open(kBlobName, files.manifest.blob.size, blob);
  if (whole.ok()) {
    files.content.push_back(std::move(blob));
  } else {
    if (whole.error().sys_errno() != ENOENT) return std::move(whole).error();
    DSEC_TRY(files.form, ReadForm(dir->get(), files.manifest.blob.size));
    if (!files.form)
      return Corrupt(id, fmt::format("neither {} nor {} is there", kBlobName, kFormName));
    files.first_name = files.form->files.front().name;
    for (const StoredForm::File& file : files.form->files)
      DSEC_TRY_VOID(open(file.name.c_str(), file.size, files.content.emplace_back()));
    if (with_meta)
      DSEC_TRY_VOID(open(kSharedMetaName, files.manifest.meta.size, files.shared_meta));
  }
  files.info = InfoOf(id, files.manifest);
  return files;
}

}  // namespace dsec::image
