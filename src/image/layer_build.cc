// SPDX-License-Identifier: Apache-2.0
// What makes layers: from a source to the files of the store.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "base/fault.h"
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
#include "image/tree_diff.h"
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

// What the steps of one build share.
struct LayerStore::Building {
  const BuildRequest& request;
  const WorkDir& work;
  Throttle throttle;
  Warnings warnings;
  BuildReport report;
  StopWatch watch;
  std::unique_ptr<ChunkStore> chunks;
  uint64_t entries = 0;  // of the source

  // The folder with the files of the next layer, empty.
  Result<os::UniqueFd> MakeOut() const {
    DSEC_TRY_VOID(os::MakeDir(work.fd.get(), "out", 0700));
    return os::OpenAt(work.fd.get(), "out", O_RDONLY | O_DIRECTORY);
  }
};

// One layer of a build.
struct LayerStore::Part {
  const Tree& tree;
  std::vector<LayerId> lower;
  ImageConfig config;
  std::optional<LayerName> name;
  bool only = true;  // nothing else is made of the content
  bool last = true;
};

Result<BuildReport> LayerStore::BuildOnce(const BuildRequest& request,
                                          const std::optional<LayerName>& name,
                                          const ProgressFn& progress) {
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  const int dir = work.fd.get();
  Building build{request, work, Throttle(progress), {}, {}, {}, nullptr};
  BuildReport& report = build.report;
  DSEC_TRY(const auto image, OpenImage(request, work, build.warnings, [&](uint64_t bytes) {
             return build.throttle({Progress::Phase::kFetch, 0, bytes, 0});
           }));
  report.fetch_ms = build.watch.Lap();
  DSEC_TRY_VOID(RequireSpace(dir, image->least_bytes(), "the import"));
  DSEC_TRY(const auto out, build.MakeOut());
  DSEC_TRY(build.chunks,
           ChunkStore::Create(out.get(), kBlobName, request.compression, IndexSeed()));
  Tree tree;
  DSEC_TRY(const auto cuts, ReadImage(build, *image, tree));
  report.read_ms = build.watch.Lap();

  if (request.kind != LayerKind::kBase) WarnOfHiddenLinks(tree, build.warnings);
  DSEC_TRY_VOID(SettleContent(tree, *build.chunks));
  const ImageConfig config = request.kind == LayerKind::kBase ? image->config() : ImageConfig();
  if (cuts.empty()) {
    DSEC_TRY_VOID(WriteLayer(
        build, out.get(), {.tree = tree, .lower = request.lower, .config = config, .name = name}));
  } else {
    for (const auto& cut : cuts) DSEC_TRY_VOID(SettleContent(*cut, *build.chunks));
    // The content of all is taken from there.
    if (::renameat(dir, "out", dir, "content") != 0) return StoreError("name the content");
    std::vector<LayerId> lower;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const Tree& view = i < cuts.size() ? *cuts[i] : tree;
      Tree changes;
      if (i > 0) DiffTrees(*cuts[i - 1], view, changes);
      Part part{.tree = i > 0 ? changes : view, .lower = lower, .config = {}, .name = {}};
      part.only = false;
      part.last = i == cuts.size();
      if (part.last) {
        part.config = config;
        part.name = name;
      }
      DSEC_TRY_VOID(os::RemoveTree(dir, "out"));
      ::unlinkat(dir, kMovingName, 0);
      DSEC_TRY(const auto next, build.MakeOut());
      DSEC_TRY_VOID(WriteLayer(build, next.get(), std::move(part)));
      lower.push_back(report.layer.id);
      DSEC_FAULT_POINT("layer.pairs.between");
    }
  }
  report.warnings = build.warnings.list();
  report.warning_count = build.warnings.count();
  return std::move(report);
}

// The tree of the image. Where it is so large that it becomes several layers, also what it shows
// below each further one: a layer of the image goes to those before it as long as the content that
// they brought stays within the bound.
Result<std::vector<std::unique_ptr<Tree>>> LayerStore::ReadImage(Building& build,
                                                                 ImageReader& image,
                                                                 Tree& tree) const {
  const BuildRequest& request = build.request;
  const bool above = request.kind != LayerKind::kBase || !request.lower.empty();
  TreeBuilder builder(tree, *build.chunks, {request.limits, above}, build.warnings);
  builder.set_proceed([&] {
    const TreeStats& stats = builder.stats();
    return build.throttle(
        {Progress::Phase::kRead, stats.entries, stats.content_bytes, image.least_bytes()});
  });
  const size_t count = image.layer_count();
  const bool may_cut = !above && image.has_whiteouts() && request.collapse_bytes > 0;
  std::vector<std::unique_ptr<Tree>> cuts;
  std::unique_ptr<Tree> before;  // the layer that is read
  uint64_t begun = 0;            // content when the present pair began
  for (size_t i = 0; i < count; ++i) {
    const uint64_t read = builder.stats().content_bytes;
    DSEC_TRY(const auto source, image.OpenLayer(i));
    builder.BeginLayer(image.has_whiteouts());
    Entry entry;
    while (true) {
      DSEC_TRY(const bool more, source->Next(entry));
      if (!more) break;
      DSEC_TRY_VOID(builder.Add(entry, *source));
    }
    if (before != nullptr && read > begun && cuts.size() < Manifest::kMaxLower &&
        builder.stats().content_bytes - begun > request.collapse_bytes) {
      cuts.push_back(std::move(before));
      begun = read;
    }
    if (may_cut && i + 1 < count) before = tree.Clone();
  }
  build.entries = builder.stats().entries;
  return cuts;
}

// Makes and publishes one layer; `report` tells of it.
Result<void> LayerStore::WriteLayer(Building& build, int out, Part part) {
  const BuildRequest& request = build.request;
  BuildReport& report = build.report;
  ChunkStore& chunks = *build.chunks;
  Warnings unheard;  // a name of the list is in one of the layers
  if (!part.only) chunks.BeginPlacement();
  PlaceContent(part.tree, request.first_touch, chunks, part.only ? build.warnings : unheard);
  Manifest manifest;
  manifest.kind = request.kind;
  manifest.config = std::move(part.config);
  manifest.lower = std::move(part.lower);
  if (!manifest.lower.empty()) manifest.format = Manifest::kWithLower;
  const uint64_t blob_bytes = chunks.placed_bytes();
  const auto proceed = [&](uint64_t bytes) {
    return build.throttle({Progress::Phase::kWrite, build.entries, bytes, blob_bytes});
  };
  DSEC_TRY(const MetaImage meta, WriteMeta(out, part.tree, chunks, proceed));
  manifest.meta = meta.digest;
  auto finished = part.only ? chunks.Finish(proceed) : chunks.FinishInto(out, kBlobName, proceed);
  DSEC_TRY(const ChunkStore::Blob blob, std::move(finished));
  manifest.blob = blob.digest;
  manifest.chunks = blob.chunks;
  report.content_copied = blob.copied;
  report.write_ms += build.watch.Lap();
  std::optional<SharedContent> shared;
  if (request.share && !request.compression.on()) {
    DSEC_TRY(shared, Share(out, chunks, proceed, build.warnings));
  }
  if (shared) report.shared_bytes += shared->form.shared_blocks() * StoredForm::kBlock;
  report.share_ms += build.watch.Lap();

  if (!build.throttle({Progress::Phase::kPublish, meta.entries, blob_bytes, blob_bytes})) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled before it was published");
  }
  LayerInfo layer = InfoOf(manifest.Id(), manifest);
  layer.entries = meta.entries;
  layer.content_bytes = meta.content_bytes;
  layer.created_unix_ms = UnixMillis(clock_.Wall());
  layer.source = request.path;
  if (part.last) layer.labels = request.labels;
  if (meta.compressed) layer.labels[kCompressedLabel] = DescribeCompression(request.compression);
  for (const auto& [file, text] :
       {std::pair(kTableName, blob.table), std::pair(kManifestName, manifest.Encode()),
        std::pair(kOriginName, EncodeOrigin(layer))}) {
    DSEC_TRY_VOID(os::CreateFile(out, file, text, 0600));
    DSEC_TRY_VOID(SyncAt(out, file));
  }
  if (::fsync(out) != 0) return StoreError("fsync the image folder");
  // No digest proves a form, so that one which is there is read before it stays.
  DSEC_TRY(const bool damaged, SharesWrongly(layer.id, proceed));
  DSEC_TRY_VOID(Publish(build.work, manifest, layer, part.name, damaged, report.existed));
  if (!report.existed && !request.compression.on()) AddToIndex(HexOf(layer.id), chunks, shared);
  DSEC_TRY(report.layer, catalog_->Find(layer.id.str()));
  report.publish_ms += build.watch.Lap();
  return Ok();
}

}  // namespace dsec::image
