// SPDX-License-Identifier: Apache-2.0
#include "image/layer_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/layer_files.h"
#include "image/store_work.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr size_t kMaxManifest = 1 << 20;
constexpr size_t kMaxOrigin = 4 << 20;

}  // namespace

LayerStore::LayerStore(std::string root, const Clock& clock)
    : root_(std::move(root)), clock_(clock) {}
LayerStore::~LayerStore() = default;

Result<std::unique_ptr<LayerStore>> LayerStore::Open(std::string root, const Clock& clock) {
  auto store = At(std::move(root), clock);
  DSEC_TRY_VOID(store->Ready());
  return store;
}

std::unique_ptr<LayerStore> LayerStore::At(std::string root, const Clock& clock) {
  return std::unique_ptr<LayerStore>(new LayerStore(std::move(root), clock));
}

Result<void> LayerStore::Ready() const {
  const std::lock_guard lock(open_mutex_);
  if (open_) return Ok();
  // Nobody reads what Init sets before it has been called.
  auto& self = const_cast<LayerStore&>(*this);
  DSEC_TRY_VOID(self.Init().Context("layer store {}", root_));
  self.open_ = true;
  return Ok();
}

Result<void> LayerStore::Init() {
  DSEC_TRY(root_fd_, MakeAndOpenDir(AT_FDCWD, root_.c_str(), 0700));
  DSEC_TRY(blobs_fd_, MakeAndOpenDir(root_fd_.get(), "blobs", 0700));
  DSEC_TRY(tmp_fd_, MakeAndOpenDir(root_fd_.get(), "tmp", 0700));
  DSEC_TRY(catalog_, Catalog::Open(root_ + "/catalog.db"));
  if (catalog_->created()) DSEC_TRY_VOID(Reindex());
  return Sweep();
}

// Held while the set of layers or of work folders changes; short.
Result<os::UniqueFd> LayerStore::Lock() const {
  DSEC_TRY(auto fd, os::OpenAt(root_fd_.get(), "lock", O_RDWR | O_CREAT, 0600));
  while (::flock(fd.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return StoreError("lock the layer store");
  }
  return fd;
}

Result<LayerStore::WorkDir> LayerStore::MakeWorkDir() const {
  DSEC_TRY(const auto lock, Lock());  // a sweep must not find the folder before it is locked
  const std::string name = NewUlid(clock_);
  if (::mkdirat(tmp_fd_.get(), name.c_str(), 0700) != 0) return StoreError("make a work folder");
  DSEC_TRY(auto fd, os::OpenAt(tmp_fd_.get(), name.c_str(), O_RDONLY | O_DIRECTORY));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return StoreError("lock a work folder");
  return WorkDir(tmp_fd_.get(), name, std::move(fd));
}

Result<void> LayerStore::Sweep() const {
  std::vector<WorkDir> stale;  // removed on return, after the store's lock is free again
  DSEC_TRY(const auto lock, Lock());
  DSEC_TRY(const auto names, ListNames(tmp_fd_.get(), UINT64_MAX));
  for (const std::string& name : names) {
    auto fd = os::OpenAt(tmp_fd_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
    if (!fd.ok() || ::flock(fd->get(), LOCK_EX | LOCK_NB) != 0) continue;
    DSEC_TRY_VOID(FinishInterrupted(fd->get()));
    stale.emplace_back(tmp_fd_.get(), name, *std::move(fd));
  }
  return Ok();
}

// A death between the move of the files and the change of the catalogue: files without a row are
// nobody's.
Result<void> LayerStore::FinishInterrupted(int work) const {
  auto hex = os::ReadFile(work, kMovingName, 64);
  if (!hex.ok() || !IsSha256Hex(*hex)) return Ok();
  auto known = catalog_->Find("sha256:" + *hex);
  if (known.ok()) return Ok();
  if (known.error().code() != Code::kNotFound) return std::move(known).error();
  DSEC_TRY(const LeaseUse use, LeaseUseOf(LayerId("sha256:" + *hex)));
  return use.files_stay ? Condemn(*hex) : os::RemoveTree(blobs_fd_.get(), hex->c_str());
}

Result<void> LayerStore::Reindex() {
  DSEC_TRY(const auto lock, Lock());
  DSEC_TRY(const auto names, ListNames(blobs_fd_.get(), UINT64_MAX));
  for (const std::string& hex : names) {
    const std::string path = hex + "/" + kManifestName;
    auto text = os::ReadFile(blobs_fd_.get(), path.c_str(), kMaxManifest);
    if (!text.ok()) continue;
    auto manifest = Manifest::Parse(*text);
    if (!manifest.ok() || HexOf(manifest->Id()) != hex) {
      log::Warn("layer.corrupt_manifest", {{"layer", hex}});
      continue;
    }
    LayerInfo layer;
    layer.id = manifest->Id();
    layer.kind = manifest->kind;
    layer.meta_bytes = manifest->meta.size;
    layer.blob_bytes = manifest->blob.size;
    layer.created_unix_ms = UnixMillis(clock_.Wall());
    layer.source = "found without catalogue";
    layer.config = manifest->config;
    layer.lower = manifest->lower;
    const std::string origin_path = hex + "/" + kOriginName;
    auto origin = os::ReadFile(blobs_fd_.get(), origin_path.c_str(), kMaxOrigin);
    if (origin.ok()) {
      if (auto read = DecodeOrigin(*origin, layer); !read.ok()) {
        log::Warn("layer.corrupt_origin", {{"layer", hex}, {"error", read.error()}});
      }
    }
    DSEC_TRY_VOID(catalog_->Put(layer, std::nullopt));
  }
  return Ok();
}

Result<void> CheckKind(const LayerInfo& layer, std::string_view ref, LayerKind kind) {
  if (layer.kind == kind) return Ok();
  return Error(
      Code::kInvalidArgument, "layer.wrong_kind",
      fmt::format("{} is a {}, not a {}", Printable(ref), KindName(layer.kind), KindName(kind)));
}

Result<LayerInfo> LayerStore::Find(std::string_view ref) const {
  DSEC_TRY_VOID(Ready());
  return catalog_->Find(ref);
}

Result<LayerInfo> LayerStore::Resolve(std::string_view ref, LayerKind kind) const {
  DSEC_TRY(LayerInfo layer, Find(ref));
  DSEC_TRY_VOID(CheckKind(layer, ref, kind));
  return layer;
}

Result<std::vector<LayerInfo>> LayerStore::List(const ListFilter& filter) const {
  DSEC_TRY_VOID(Ready());
  return catalog_->List(filter);
}

bool LayerStore::Intact(const std::string& hex, const Manifest& manifest) const {
  const auto size_is = [&](const char* file, uint64_t size) {
    struct stat status;
    const std::string path = hex + "/" + file;
    return ::fstatat(blobs_fd_.get(), path.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
           S_ISREG(status.st_mode) && static_cast<uint64_t>(status.st_size) == size;
  };
  if (manifest.chunks.bytes != 0 && !size_is(kTableName, ChunkTable::FileBytes(manifest)))
    return false;
  if (!size_is(kMetaName, manifest.meta.size) || !size_is(kManifestName, manifest.Encode().size()))
    return false;
  if (size_is(kBlobName, manifest.blob.size)) return true;
  const auto folder = os::OpenAt(blobs_fd_.get(), hex.c_str(), O_RDONLY | O_DIRECTORY);
  if (!folder.ok()) return false;
  const auto form = ReadForm(folder->get(), manifest.blob.size);
  return form.ok() && *form && size_is(kSharedMetaName, manifest.meta.size) &&
         std::ranges::all_of((*form)->files, [&](const StoredForm::File& file) {
           return size_is(file.name.c_str(), file.size);
         });
}

Result<void> LayerStore::Publish(const WorkDir& work, const Manifest& manifest,
                                 const LayerInfo& layer, const std::optional<LayerName>& name,
                                 bool damaged, bool& existed) {
  DSEC_TRY(const auto lock, Lock());
  for (const LayerId& lower : layer.lower) {
    auto there = catalog_->Find(lower.str());
    if (!there.ok()) return std::move(there).error().Context("a layer that goes below");
  }
  const std::string hex = HexOf(layer.id);
  const int dir = work.fd.get();
  DSEC_TRY_VOID(os::CreateFile(dir, kMovingName, hex, 0600));
  existed = !damaged && Intact(hex, manifest);
  if (!existed) {
    // A damaged copy is moved out of the way; whoever has it mounted keeps its files.
    DSEC_TRY(const LeaseUse use, LeaseUseOf(layer.id));
    if (use.files_stay) {
      DSEC_TRY_VOID(Condemn(hex));
    } else if (::renameat(blobs_fd_.get(), hex.c_str(), dir, "damaged") != 0 && errno != ENOENT) {
      return StoreError("move a damaged layer away");
    }
    // Under the lock; a folder that is there all the same is not empty, which rename(2) refuses.
    // RENAME_NOREPLACE is not known to every FUSE client.
    if (::renameat(dir, "out", blobs_fd_.get(), hex.c_str()) != 0) {
      return StoreError("publish the layer");
    }
  } else {
    // As its row in the catalogue: the last build says where the content comes from.
    const std::string from = std::string("out/") + kOriginName;
    const std::string to = hex + "/" + kOriginName;
    if (::renameat(dir, from.c_str(), blobs_fd_.get(), to.c_str()) != 0) {
      return StoreError("replace the origin of the layer");
    }
  }
  const auto record = [&]() -> Result<void> {
    if (::fsync(blobs_fd_.get()) != 0) return StoreError("fsync the layer folder");
    DSEC_FAULT_POINT("layer.publish.before_catalog");
    return catalog_->Put(layer, name);
  };
  auto recorded = record();
  if (!recorded.ok()) static_cast<void>(FinishInterrupted(dir));  // the first error counts
  return recorded;
}

Result<LayerFiles> LayerStore::OpenFiles(const LayerId& id) const {
  DSEC_TRY(LayerInfo info, Find(id.str()));
  DSEC_TRY(LayerFiles files, OpenLayer(blobs_fd_.get(), id, true));
  files.info = std::move(info);
  return files;
}

Result<void> LayerStore::Remove(std::string_view ref, const InUseFn& in_use) {
  DSEC_TRY_VOID(Ready());
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  DSEC_TRY(const auto lock, Lock());
  DSEC_TRY(const LayerInfo layer, catalog_->Find(ref));
  if (!ref.starts_with("sha256:")) {
    DSEC_TRY(const LayerName name, ParseLayerName(ref));
    if (layer.names.size() > 1) return catalog_->RemoveName(name);
  }
  DSEC_TRY(const auto upper, catalog_->UpperOf(layer.id));
  if (upper)
    return LayerInUse(layer.id, fmt::format("layer {}, which lies above it", upper->str()));
  if (in_use) {
    DSEC_TRY(const bool used, in_use(layer.id));
    if (used) return LayerInUse(layer.id, "a sandbox");
  }
  DSEC_TRY(const LeaseUse use, LeaseUseOf(layer.id));
  if (!use.elsewhere.empty()) return LayerInUse(layer.id, "node " + use.elsewhere);
  DSEC_TRY_VOID(RemoveLocked(layer.id, work, use.files_stay).Context("remove {}", Printable(ref)));
  ForgetInIndex(HexOf(layer.id));
  return Ok();
}

}  // namespace dsec::image
