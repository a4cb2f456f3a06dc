// SPDX-License-Identifier: Apache-2.0
// What makes layers: from a source to the files of the store.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "image/chunk_table.h"
#include "image/digest.h"
#include "image/dir_source.h"
#include "image/erofs_writer.h"
#include "image/fs.h"
#include "image/importers.h"
#include "image/layer_files.h"
#include "image/layer_store.h"
#include "image/registry.h"
#include "image/share_content.h"
#include "image/store_work.h"
#include "image/tree_builder.h"
#include "os/file.h"

namespace dsec::image {
namespace {

constexpr auto kProgressPeriod = std::chrono::milliseconds(100);

Result<void> SyncAt(int dirfd, const char* name) {
  DSEC_TRY(const auto fd, os::OpenAt(dirfd, name, O_RDONLY));
  if (::fsync(fd.get()) != 0) return StoreError(fmt::format("fsync {}", name));
  return Ok();
}

// Calls a ProgressFn when a phase begins and at most ten times a second; between two calls the
// answer is to go on.
class Throttle {
 public:
  explicit Throttle(const ProgressFn& progress) : progress_(progress) {}
  bool operator()(const Progress& state) {
    if (!progress_) return true;
    const MonoTime now = Clock::System().Mono();
    if (phase_ == state.phase && now - last_ < kProgressPeriod) return true;
    phase_ = state.phase;
    last_ = now;
    return progress_(state);
  }

 private:
  const ProgressFn& progress_;
  std::optional<Progress::Phase> phase_;
  MonoTime last_;
};

Result<MetaImage> WriteMeta(int out, const Tree& tree, const ChunkStore& chunks,
                            const std::function<bool(uint64_t)>& proceed) {
  const os::UniqueFd fd(::openat(out, kMetaName, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd.valid()) return StoreError("make the metadata");
  return WriteErofs(tree, chunks, fd.get(), proceed);
}

// A folder where the base has a link hides all that the link leads to: with /lib gone, no program
// of the base starts.
void WarnOfHiddenLinks(const Tree& tree, Warnings& warnings) {
  for (const char* name : {"bin", "sbin", "lib", "lib32", "lib64", "libx32"}) {
    const Name* found = tree.Find(Tree::kRoot, name);
    if (found == nullptr || !tree.inode(found->inode).is_folder()) continue;
    warnings.Add(fmt::format(
        "/{0} is a folder: over a base where /{0} is a link to usr/{0}, as in most distributions, "
        "it hides what the link leads to, and programs of the base do not start",
        name));
  }
}

class StopWatch {
 public:
  uint64_t Lap() {
    const MonoTime now = Clock::System().Mono();
    const auto span = now - std::exchange(last_, now);
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(span).count());
  }

 private:
  MonoTime last_ = Clock::System().Mono();
};

}  // namespace

Result<std::unique_ptr<ImageReader>> LayerStore::OpenImage(
    const BuildRequest& request, const WorkDir& work, Warnings& warnings,
    const std::function<bool(uint64_t)>& proceed) const {
  if (request.open) return request.open(warnings);
  switch (request.source) {
    case SourceKind::kDirectory:
      return OpenDirectory(request.path, request.limits, warnings);
    case SourceKind::kTar:
      return OpenTar(request.path, request.limits, warnings);
    case SourceKind::kOciLayout:
      return OpenOciLayout(request.path, request.ref, request.limits, warnings);
    case SourceKind::kDockerArchive:
      return OpenDockerArchive(request.path, request.ref, work.fd.get(), request.limits, warnings);
    case SourceKind::kRegistry: {
      DSEC_TRY(const auto cache, MakeAndOpenDir(root_fd_.get(), kCacheName, 0700));
      DSEC_TRY_VOID(FetchImage({.ref = request.path,
                                .plain_http = request.plain_http,
                                .work = work.fd.get(),
                                .cache = std::string("../../") + kCacheName},
                               proceed));
      return OpenOciLayout(fmt::format("{}/tmp/{}/{}", root_, work.name, kFetchedLayout), "",
                           request.limits, warnings, root_ + "/" + kCacheName);
    }
  }
  return Error(Code::kInvalidArgument, "layer.source", "unknown kind of source");
}

Result<BuildReport> LayerStore::Build(const BuildRequest& request, const ProgressFn& progress) {
  DSEC_TRY_VOID(Ready());
  std::optional<LayerName> name;
  if (!request.name.empty()) {
    DSEC_TRY(name, ParseLayerName(request.name));
    auto owner = catalog_->Find(name->str());
    if (owner.ok() && owner->kind != request.kind) {  // Put decides; this spares the work
      return Error(Code::kConflict, "layer.kind_conflict",
                   fmt::format("{} names a {} already", name->str(), KindName(owner->kind)))
          .WithField("name");
    }
  }
  auto built = BuildOnce(request, name, progress);
  if (request.source != SourceKind::kRegistry) return built;
  DSEC_TRY(const auto cache, MakeAndOpenDir(root_fd_.get(), kCacheName, 0700));
  if (!built.ok() && built.error().reason() == "layer.digest_mismatch") {
    DSEC_TRY_VOID(DropDamagedBlobs(cache.get()));
    built = BuildOnce(request, name, progress);
  }
  DSEC_TRY_VOID(DropUnusedBlobs(cache.get()));
  return built;
}

Result<BuildReport> LayerStore::BuildOnce(const BuildRequest& request,
                                          const std::optional<LayerName>& name,
                                          const ProgressFn& progress) {
  BuildReport report;
  StopWatch watch;
  Warnings warnings;
  Throttle throttle(progress);
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  const int dir = work.fd.get();
  DSEC_TRY(const auto image, OpenImage(request, work, warnings, [&](uint64_t bytes) {
             return throttle({Progress::Phase::kFetch, 0, bytes, 0});
           }));
  report.fetch_ms = watch.Lap();
  DSEC_TRY_VOID(RequireSpace(dir, image->least_bytes(), "the import"));
  DSEC_TRY_VOID(os::MakeDir(dir, "out", 0700));
  DSEC_TRY(const auto out, os::OpenAt(dir, "out", O_RDONLY | O_DIRECTORY));
  DSEC_TRY(const auto chunks,
           ChunkStore::Create(out.get(), kBlobName, request.compression, IndexSeed()));
  Tree tree;
  TreeBuilder builder(tree, *chunks, {request.limits, request.kind != LayerKind::kBase}, warnings);
  builder.set_proceed([&] {
    const TreeStats& stats = builder.stats();
    return throttle(
        {Progress::Phase::kRead, stats.entries, stats.content_bytes, image->least_bytes()});
  });
  for (size_t i = 0; i < image->layer_count(); ++i) {
    DSEC_TRY(const auto source, image->OpenLayer(i));
    builder.BeginLayer(image->has_whiteouts());
    Entry entry;
    while (true) {
      DSEC_TRY(const bool more, source->Next(entry));
      if (!more) break;
      DSEC_TRY_VOID(builder.Add(entry, *source));
    }
  }
  report.read_ms = watch.Lap();

  if (request.kind != LayerKind::kBase) WarnOfHiddenLinks(tree, warnings);
  DSEC_TRY_VOID(SettleContent(tree, *chunks));
  PlaceContent(tree, request.first_touch, *chunks, warnings);
  Manifest manifest;
  manifest.kind = request.kind;
  if (request.kind == LayerKind::kBase) manifest.config = image->config();
  const uint64_t blob_bytes = chunks->placed_bytes();
  const auto proceed = [&](uint64_t bytes) {
    return throttle({Progress::Phase::kWrite, builder.stats().entries, bytes, blob_bytes});
  };
  DSEC_TRY(const MetaImage meta, WriteMeta(out.get(), tree, *chunks, proceed));
  manifest.meta = meta.digest;
  DSEC_TRY(const ChunkStore::Blob blob, chunks->Finish(proceed));
  manifest.blob = blob.digest;
  manifest.chunks = blob.chunks;
  report.content_copied = blob.copied;
  report.write_ms = watch.Lap();
  std::optional<SharedContent> shared;
  if (request.share && !request.compression.on()) {
    DSEC_TRY(shared, Share(out.get(), *chunks, proceed, warnings));
  }
  if (shared) report.shared_bytes = shared->form.shared_blocks() * StoredForm::kBlock;
  report.share_ms = watch.Lap();

  if (!throttle({Progress::Phase::kPublish, meta.entries, blob_bytes, blob_bytes})) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled before it was published");
  }
  LayerInfo& layer = report.layer;
  layer.id = manifest.Id();
  layer.kind = manifest.kind;
  layer.meta_bytes = manifest.meta.size;
  layer.blob_bytes = manifest.blob.size;
  layer.entries = meta.entries;
  layer.content_bytes = meta.content_bytes;
  layer.created_unix_ms = UnixMillis(clock_.Wall());
  layer.source = request.path;
  layer.config = manifest.config;
  layer.labels = request.labels;
  if (meta.compressed) layer.labels[kCompressedLabel] = DescribeCompression(request.compression);
  for (const auto& [file, text] :
       {std::pair(kTableName, blob.table), std::pair(kManifestName, manifest.Encode()),
        std::pair(kOriginName, EncodeOrigin(layer))}) {
    DSEC_TRY_VOID(os::CreateFile(out.get(), file, text, 0600));
    DSEC_TRY_VOID(SyncAt(out.get(), file));
  }
  if (::fsync(out.get()) != 0) return StoreError("fsync the image folder");
  DSEC_TRY_VOID(Publish(work, manifest, layer, name, report.existed));
  if (!report.existed && !request.compression.on()) AddToIndex(HexOf(layer.id), *chunks, shared);
  DSEC_TRY(report.layer, catalog_->Find(layer.id.str()));
  report.publish_ms = watch.Lap();
  report.warnings = warnings.list();
  report.warning_count = warnings.count();
  return report;
}

}  // namespace dsec::image
