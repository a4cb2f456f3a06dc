// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/id.h"
#include "base/result.h"
#include "image/catalog.h"
#include "image/compressor.h"
#include "image/content_order.h"
#include "image/entry.h"
#include "image/layer.h"
#include "image/layer_files.h"
#include "image/layer_trace.h"
#include "os/unique_fd.h"

namespace dsec::image {

class ChunkIndex;
class ChunkStore;
class Tree;
struct SharedContent;

enum class SourceKind { kDirectory, kTar, kOciLayout, kDockerArchive, kRegistry };

struct BuildRequest {
  LayerKind kind = LayerKind::kBase;
  std::string name;  // NAME[:TAG]; empty: the layer is reached by its id alone
  SourceKind source = SourceKind::kDirectory;
  std::string
      path;  // what it is called, with `open`; of a registry: HOST[:PORT]/NAME[:TAG|@DIGEST]
  bool plain_http = false;  // of a registry
  std::string ref;          // which image of an OCI layout or docker archive; empty: the only one
  // In place of `source`. What it opens may refer to the warnings, and is gone when the build ends.
  std::function<Result<std::unique_ptr<ImageReader>>(Warnings&)> open = nullptr;
  std::map<std::string, std::string> labels;
  ImportLimits limits;
  // What runs read first lies together at the front of the blob; part of the content and so of the
  // id. Empty: the order of a walk through the tree.
  std::vector<FirstTouch> first_touch;
  // An image of which the layers bring more content than this becomes several layers, of its layers
  // in a row each, as far as one of them alone is not larger; the upper ones are bases that have
  // the others below them (Manifest::lower). Of a base from an OCI layout, docker archive or
  // registry; 0: never.
  uint64_t collapse_bytes = 3ull << 30;
  // The layer, a base, goes above these, lowest first; its whiteouts are kept.
  std::vector<LayerId> lower;
  // Content that other layers of the store have is kept once (format_spec.md, "Shared content").
  // The id does not depend on it. Never with compression.
  bool share = true;
  // Part of the bytes and so of the id, as is the version of liblz4; kept as label
  // kCompressedLabel.
  Compression compression;
};

// On a layer with compressed files: DescribeCompression.
inline constexpr char kCompressedLabel[] = "dsec.compressed";

struct BuildReport {
  LayerInfo layer;
  bool existed = false;               // the same content was there before
  std::vector<std::string> warnings;  // what was left out and why, the first 100
  uint64_t warning_count = 0;
  bool content_copied = false;  // the source brought the content in another order
  uint64_t shared_bytes = 0;    // of content that other layers of the store have
  uint64_t fetch_ms = 0;        // the download from a registry
  uint64_t read_ms = 0;         // the source, its content on its way into the blob
  uint64_t write_ms = 0;        // the blob in its order, its digest, the metadata
  uint64_t share_ms = 0;        // comparing with other layers, the rest in a file of its own
  uint64_t publish_ms = 0;      // rename, catalogue
};

// kInvalidArgument "layer.wrong_kind" unless the layer that `ref` names is a `kind`.
Result<void> CheckKind(const LayerInfo& layer, std::string_view ref, LayerKind kind);

// Says whether something beyond the mounts of this node uses a layer.
using InUseFn = std::function<Result<bool>(const LayerId&)>;

struct CollectOptions {
  std::chrono::milliseconds unnamed_for = std::chrono::hours(7 * 24);
  // Files of removed layers are kept so long: longer than a node needs from a name to its lease.
  std::chrono::milliseconds grace = std::chrono::minutes(10);
  bool dry_run = false;
};

struct CollectReport {
  std::vector<LayerId> removed;                         // with dry_run: would be
  std::vector<std::pair<LayerId, std::string>> in_use;  // unnamed, and by whom
  uint64_t removed_bytes = 0;
  uint64_t young = 0;    // unnamed, not for long enough
  uint64_t waiting = 0;  // removed layers whose files are not deleted yet
  uint64_t deleted = 0;  // of those before, now
};

// The layers under one root folder (format_spec.md). Blocking: call it from a thread that may wait
// for the file system. Thread-safe; any number of processes may use the same root. Whatever kill -9
// leaves is swept by the next Open; a build that still runs in another process is not. All errors
// of a build are "layer.*"; then nothing of it stays.
class LayerStore {
 public:
  // Makes the root (0700) if it is missing.
  static Result<std::unique_ptr<LayerStore>> Open(std::string root,
                                                  const Clock& clock = Clock::System());
  // The same without touching the root: each method opens the store if none before has.
  static std::unique_ptr<LayerStore> At(std::string root, const Clock& clock = Clock::System());
  ~LayerStore();

  // `ref` is an id, at least 12 digits of one, or NAME[:TAG]. kNotFound "layer.not_found"; a layer
  // of another kind: kInvalidArgument "layer.wrong_kind".
  Result<LayerInfo> Resolve(std::string_view ref, LayerKind kind) const;
  Result<LayerInfo> Find(std::string_view ref) const;  // of any kind
  Result<std::vector<LayerInfo>> List(const ListFilter& filter) const;

  // Imports the source and publishes it under its content id; equal content gives the equal id,
  // built once or twice, here or elsewhere. kResourceExhausted "layer.no_space" as early as it can
  // be known.
  Result<BuildReport> Build(const BuildRequest& request, const ProgressFn& progress);

  // By NAME:TAG: takes the name away, and the layer with it when that was the last. By id: the
  // layer with all its names. A layer that is mounted on this node or that another one has in its
  // lease, or of which `in_use` (may be empty) says so, stays: kConflict "layer.in_use". While a
  // node lists the layer or other machines have leases, the files wait for DeleteRemoved.
  Result<void> Remove(std::string_view ref, const InUseFn& in_use = nullptr);

  // Removes layers that no name leads to and nobody has used for a time, and deletes the files of
  // what was removed once no node can have it mounted. Never what a lease lists or a lock holds;
  // an unreadable lease ends it: kInternal "layer.bad_lease".
  Result<CollectReport> Collect(const CollectOptions& options);
  // The second half of it alone.
  Result<CollectReport> DeleteRemoved() const;

  // Opens the files of a layer and checks manifest and sizes against its id. kNotFound
  // "layer.not_found", kInternal "layer.corrupt".
  Result<LayerFiles> OpenFiles(const LayerId& id) const;

  // Puts a trace of first reads (format_spec.md, "Traces") beside the layer, within the bounds of
  // one, in place of the one there was; `merge`: behind it, without what it has. The trace that is
  // there now. kNotFound "layer.not_found".
  Result<LayerTrace> SaveTrace(const LayerId& id, LayerTrace trace, bool merge);
  // nullopt: the layer has none. kInternal "layer.bad_trace".
  Result<std::optional<LayerTrace>> FindTrace(std::string_view ref) const;
  // False: there was none.
  Result<bool> RemoveTrace(std::string_view ref);

  // Makes the index of chunks (ChunkIndex) complete for the layers that are here: reads the content
  // of those that it does not know. How many these were. `progress` comes with the phase kRead.
  Result<uint64_t> IndexContent(const ProgressFn& progress);
  // kFailedPrecondition "layer.no_links": no content is shared here.
  Result<void> CheckSharing() const;

  const std::string& root() const { return root_; }

 private:
  struct WorkDir;
  LayerStore(std::string root, const Clock& clock);
  Result<void> Init();
  Result<void> Ready() const;
  Result<os::UniqueFd> Lock() const;
  Result<WorkDir> MakeWorkDir() const;
  Result<void> Sweep() const;
  Result<void> Reindex();
  Result<void> FinishInterrupted(int work) const;
  Result<BuildReport> BuildOnce(const BuildRequest& request, const std::optional<LayerName>& name,
                                const ProgressFn& progress);
  struct Building;
  struct Part;
  Result<std::vector<std::unique_ptr<Tree>>> ReadImage(Building& build, ImageReader& image,
                                                       Tree& tree) const;
  Result<void> WriteLayer(Building& build, int out, Part part);
  Result<std::unique_ptr<ImageReader>> OpenImage(
      const BuildRequest& request, const WorkDir& work, Warnings& warnings,
      const std::function<bool(uint64_t)>& proceed) const;
  // `damaged`: what is there under this id is not to be kept.
  Result<void> Publish(const WorkDir& work, const Manifest& manifest, const LayerInfo& layer,
                       const std::optional<LayerName>& name, bool damaged, bool& existed);
  Result<bool> SharesWrongly(const LayerId& id, const std::function<bool(uint64_t)>& proceed) const;
  Result<std::optional<SharedContent>> Share(int out, const ChunkStore& chunks,
                                             const std::function<bool(uint64_t)>& proceed,
                                             Warnings& warnings) const;
  std::optional<uint64_t> IndexSeed() const;
  void AddToIndex(const std::string& hex, const ChunkStore& chunks,
                  const std::optional<SharedContent>& shared) const;
  void PruneIndex() const;
  void ForgetInIndex(const std::string& hex) const;
  struct Indexing;
  Result<bool> IndexLayer(Indexing& indexing, const LayerId& id, bool own) const;
  std::string IndexPath() const;
  bool Intact(const std::string& hex, const Manifest& manifest) const;
  Result<void> RemoveLocked(const LayerId& id, const WorkDir& work, bool condemn);
  // What the leases say of a layer.
  struct LeaseUse {
    std::string elsewhere;    // a node of another machine, whose locks need not be seen here
    bool files_stay = false;  // after a removal: listed, or another machine may be about to
  };
  Result<LeaseUse> LeaseUseOf(const LayerId& id) const;
  Result<void> Condemn(const std::string& hex) const;
  Result<void> CollectUnnamed(const CollectOptions& options, CollectReport& report);
  Result<void> DeleteCondemned(const CollectOptions& options, CollectReport& report) const;

  std::string root_;
  const Clock& clock_;
  mutable std::mutex open_mutex_;
  bool open_ = false;
  os::UniqueFd root_fd_;
  os::UniqueFd blobs_fd_;
  os::UniqueFd tmp_fd_;
  std::unique_ptr<Catalog> catalog_;
};

}  // namespace dsec::image
