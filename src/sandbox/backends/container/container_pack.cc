// SPDX-License-Identifier: Apache-2.0
// A consistent layer of what changed in a running sandbox.
#include <fcntl.h>

#include <chrono>
#include <optional>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "image/dir_source.h"
#include "os/file.h"
#include "sandbox/backends/container/container_host.h"
#include "sandbox/backends/container/pack_request.h"
#include "sandbox/isolators/freezer.h"

namespace dsec::sandbox {
namespace {

using std::chrono::seconds;

constexpr auto kFreezeTime = seconds(5);
// Where there are no copies the code stands still while its files are read.
constexpr auto kMaxFrozen = seconds(60);
constexpr std::string_view kOwnLabels = "dsec.";
constexpr size_t kMaxLabels = 64;
constexpr size_t kMaxLabelBytes = 4096;

uint64_t MicrosSince(MonoTime begin) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::System().Mono() - begin)
          .count());
}

image::PackRules RulesOf(const v1::PackRequest& request) {
  image::PackRules rules;
  rules.scrub = {request.scrub().begin(), request.scrub().end()};
  rules.default_scrub = !request.no_default_scrub();
  rules.canary_paths = {request.canary_paths().begin(), request.canary_paths().end()};
  rules.canary_contents = {request.canary_contents().begin(), request.canary_contents().end()};
  return rules;
}

Result<image::LayerKind> KindOf(const v1::PackRequest& request) {
  DSEC_TRY(const auto kind,
           image::ParseKind(request.kind().empty() ? "workspace" : request.kind()));
  if (kind == image::LayerKind::kBase) {
    return Error(
               Code::kInvalidArgument, "pack.bad_kind",
               "what changed over a base is a workspace or a toolkit; layers are made into a base "
               "by flattening them together with one")
        .WithField("kind");
  }
  return kind;
}

v1::PackProgress ProgressOf(const image::Progress& progress) {
  using Phase = image::Progress::Phase;
  v1::PackProgress out;
  out.set_phase(progress.phase == Phase::kRead    ? v1::PackProgress::PHASE_READ
                : progress.phase == Phase::kWrite ? v1::PackProgress::PHASE_WRITE
                                                  : v1::PackProgress::PHASE_PUBLISH);
  out.set_entries(progress.entries);
  out.set_bytes(progress.bytes);
  out.set_total_bytes(progress.total_bytes);
  return out;
}

v1::PackReply ReplyOf(const image::BuildReport& report) {
  v1::PackReply reply;
  const image::LayerInfo& info = report.layer;
  v1::PackedLayer& layer = *reply.mutable_layer();
  layer.set_id(info.id.str());
  layer.set_kind(std::string(image::KindName(info.kind)));
  *layer.mutable_names() = {info.names.begin(), info.names.end()};
  layer.set_meta_bytes(info.meta_bytes);
  layer.set_blob_bytes(info.blob_bytes);
  layer.set_entries(info.entries);
  layer.set_content_bytes(info.content_bytes);
  layer.set_created_unix_ms(info.created_unix_ms);
  layer.set_source(info.source);
  layer.mutable_labels()->insert(info.labels.begin(), info.labels.end());
  reply.set_existed(report.existed);
  *reply.mutable_warnings() = {report.warnings.begin(), report.warnings.end()};
  reply.set_warning_count(report.warning_count);
  return reply;
}

// Where a layer comes from. Not part of its identity: equal content has one id whoever made it.
std::map<std::string, std::string> LabelsOf(const v1::SandboxRecord& record,
                                            const v1::PackRequest& request) {
  std::map<std::string, std::string> labels(request.labels().begin(), request.labels().end());
  labels["dsec.pack.sandbox"] = record.id();
  labels["dsec.pack.parents"] = fmt::format("{}", fmt::join(record.layer_ids(), ","));
  labels["dsec.pack.principal"] = request.principal();
  labels["dsec.pack.unix_ms"] = std::to_string(UnixMillis(Clock::System().Wall()));
  return labels;
}

// A copy of a writable layer, removed by the destructor.
class Copy {
 public:
  Copy(Scratch& scratch, std::string name) : scratch_(scratch), name_(std::move(name)) {}
  ~Copy() {
    if (auto removed = scratch_.Remove(name_); !removed.ok()) {
      log::Warn("scratch.remove_failed", {{"name", name_}, {"error", removed.error()}});
    }
  }
  Copy(const Copy&) = delete;
  Copy& operator=(const Copy&) = delete;

 private:
  Scratch& scratch_;
  const std::string name_;
};

}  // namespace

Result<void> CheckPackRequest(const v1::PackRequest& request) {
  DSEC_TRY_VOID(KindOf(request));
  if (!request.name().empty()) DSEC_TRY_VOID(image::ParseLayerName(request.name()));
  const auto bad = [](const std::string& key, std::string_view rule) {
    return Error(Code::kInvalidArgument, "pack.bad_label",
                 fmt::format("labels.{}: {}", image::Printable(key), rule))
        .WithField("labels." + image::Printable(key));
  };
  if (request.labels().size() > kMaxLabels) {
    return Error(Code::kInvalidArgument, "pack.bad_label",
                 fmt::format("labels: more than {}", kMaxLabels))
        .WithField("labels");
  }
  for (const auto& [key, value] : request.labels()) {
    if (key.empty()) return bad(key, "a label has a name");
    if (key.starts_with(kOwnLabels)) return bad(key, "names that begin with dsec. are the node's");
    if (key.size() + value.size() > kMaxLabelBytes) {
      return bad(key, fmt::format("name and value have more than {} bytes", kMaxLabelBytes));
    }
  }
  return RulesOf(request).Check();
}

Result<v1::PackReply> ContainerHost::Pack(const v1::SandboxRecord& record,
                                          const v1::PackRequest& request,
                                          const PackProgressFn& proceed) {
  const MonoTime begin = Clock::System().Mono();
  const Subject subject = SubjectOf(record);
  image::PackFilter filter(RulesOf(request));
  if (!proceed(v1::PackProgress())) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled before it began");
  }

  const bool copies = scratch_->copies();
  const std::string copy_name = CopyOf(subject.scratch);
  std::optional<Copy> copy;
  uint64_t frozen_us = 0;
  if (copies) {
    // One that an earlier pack could not remove.
    DSEC_TRY_VOID(scratch_->Remove(copy_name));
    // What the code overwrites is charged to it twice until the copy is gone.
    DSEC_TRY_VOID(scratch_->SetLimits(subject.scratch, 2 * subject.limits.disk_bytes(),
                                      2 * subject.limits.disk_inodes()));
    // A copy writes out what is dirty first. One made now leaves the next one little to write, for
    // which the code stands still.
    copy.emplace(*scratch_, copy_name);
    DSEC_TRY_VOID(scratch_->Copy(subject.scratch, copy_name));
    DSEC_TRY_VOID(scratch_->Remove(copy_name));
  }
  const MonoTime freeze = Clock::System().Mono();
  DSEC_TRY(auto frozen, FrozenCode::Freeze(tree_->top(), subject.slot, freeze + kFreezeTime)
                            .Context("stop the code of {}", record.id()));
  const auto thaw = [&]() -> Result<void> {
    auto thawed = frozen.Thaw();
    frozen_us = MicrosSince(freeze);
    return thawed;
  };
  DSEC_FAULT_POINT("sandbox.pack.frozen");
  if (copies) {
    DSEC_TRY_VOID(scratch_->Copy(subject.scratch, copy_name));
    DSEC_TRY_VOID(thaw());
    DSEC_FAULT_POINT("sandbox.pack.copied");
  }

  DSEC_TRY(const auto upper, scratch_->OpenUpper(copies ? copy_name : subject.scratch));
  image::BuildRequest build;
  DSEC_TRY(build.kind, KindOf(request));
  build.name = request.name();
  build.path = "sandbox " + record.id();
  build.labels = LabelsOf(record, request);
  build.open = [&](image::Warnings& warnings) -> Result<std::unique_ptr<image::ImageReader>> {
    image::OverlayFolders folders;
    DSEC_TRY(auto own, os::OpenAt(upper.get(), ".", O_RDONLY | O_DIRECTORY));
    folders.folders.push_back(std::move(own));
    folders.ids = {options_.ids.IdBase(subject.slot.index), IdPlan::kIdsPerSlot};
    folders.filter = &filter;
    return image::OpenOverlayFolders(std::move(folders), build.limits, warnings);
  };
  bool too_long = false;
  Result<void> thawed;
  const auto on_progress = [&](const image::Progress& progress) {
    if (frozen_us == 0) {
      if (progress.phase != image::Progress::Phase::kRead) thawed = thaw();
      too_long = frozen_us == 0 && Clock::System().Mono() - freeze > kMaxFrozen;
    }
    return !too_long && thawed.ok() && proceed(ProgressOf(progress));
  };
  auto built = store_->Build(build, on_progress);
  DSEC_TRY_VOID(std::move(thawed));
  if (too_long) {
    return Error(Code::kUnavailable, "pack.frozen_too_long",
                 fmt::format("reading takes more than {} s, for which the code would stand still",
                             kMaxFrozen.count()));
  }
  if (!built.ok()) return std::move(built).error();
  v1::PackReply reply = ReplyOf(*built);
  reply.set_scrubbed(filter.scrubbed());
  reply.set_frozen_us(frozen_us);
  reply.set_millis(MicrosSince(begin) / 1000);
  log::Info("sandbox.packed", {{"sandbox_id", record.id()},
                               {"layer", reply.layer().id()},
                               {"entries", reply.layer().entries()},
                               {"bytes", reply.layer().content_bytes()},
                               {"frozen_us", frozen_us},
                               {"ms", reply.millis()}});
  return reply;
}

Result<void> ContainerHost::EndPack(const v1::SandboxRecord& record) {
  const Subject subject = SubjectOf(record);
  DSEC_TRY_VOID(FrozenCode::Thaw(tree_->top(), subject.slot));
  if (scratch_ == nullptr || !scratch_->copies()) return Ok();
  return scratch_->Remove(CopyOf(subject.scratch));
}

Result<void> ContainerHost::RestoreDisk(const v1::SandboxRecord& record) {
  const v1::Limits& limits = record.spec().limits();
  return scratch_->SetLimits(record.scratch(), limits.disk_bytes(), limits.disk_inodes());
}

}  // namespace dsec::sandbox
