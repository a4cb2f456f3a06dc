// SPDX-License-Identifier: Apache-2.0
// Traces of first reads beside the layers of a store.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/fault.h"
#include "image/fs.h"
#include "image/layer_trace.h"
#include "image/store_work.h"
#include "os/file.h"

namespace dsec::image {

// Written into a work folder, which a death leaves to the sweep, and renamed into its place:
// whoever reads the trace finds the old one or the new one, whole.
Result<LayerTrace> LayerStore::SaveTrace(const LayerId& id, LayerTrace trace, bool merge) {
  DSEC_TRY_VOID(Ready());
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  // Against another merge of the same trace, and against the removal of the layer.
  DSEC_TRY(const auto lock, Lock());
  DSEC_TRY(const LayerInfo layer, catalog_->Find(id.str()));
  if (merge) {
    auto old = ReadTrace(fmt::format("{}/blobs/{}", root_, HexOf(id)));
    if (!old.ok() && old.error().reason() != "layer.bad_trace") return std::move(old).error();
    if (old.ok() && *old) trace = LayerTrace::Merge(**old, trace);
  }
  static_cast<void>(trace.Bound());
  DSEC_TRY_VOID(os::CreateFile(work.fd.get(), kTraceName, trace.Encode(), 0600));
  {
    DSEC_TRY(const auto file, os::OpenAt(work.fd.get(), kTraceName, O_RDONLY));
    if (::fsync(file.get()) != 0) return StoreError("fsync a trace");
  }
  DSEC_FAULT_POINT("layer.trace.before_rename");
  const std::string path = HexOf(id) + "/" + kTraceName;
  if (::renameat(work.fd.get(), kTraceName, blobs_fd_.get(), path.c_str()) != 0)
    return StoreError("put a trace beside its layer");
  DSEC_TRY(const auto folder,
           os::OpenAt(blobs_fd_.get(), HexOf(id).c_str(), O_RDONLY | O_DIRECTORY));
  if (::fsync(folder.get()) != 0) return StoreError("fsync the folder of a layer");
  return trace;
}

Result<std::optional<LayerTrace>> LayerStore::FindTrace(std::string_view ref) const {
  DSEC_TRY(const LayerInfo layer, Find(ref));
  return ReadTrace(fmt::format("{}/blobs/{}", root_, HexOf(layer.id)));
}

Result<bool> LayerStore::RemoveTrace(std::string_view ref) {
  DSEC_TRY(const LayerInfo layer, Find(ref));
  const std::string path = HexOf(layer.id) + "/" + kTraceName;
  if (::unlinkat(blobs_fd_.get(), path.c_str(), 0) == 0) return true;
  if (errno == ENOENT) return false;
  return StoreError("remove a trace");
}

}  // namespace dsec::image
