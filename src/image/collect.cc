// SPDX-License-Identifier: Apache-2.0
// What removes layers: from the catalogue first, then, when nobody can have them mounted, from the
// disk.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "base/fault.h"
#include "base/log.h"
#include "image/digest.h"
#include "image/fs.h"
#include "image/node_lease.h"
#include "image/store_work.h"
#include "os/file.h"
#include "os/process.h"

namespace dsec::image {
namespace {

// Who has which layer by the leases of all nodes.
Result<std::map<LayerId, std::string>> LeasedLayers(const std::string& root) {
  DSEC_TRY(const auto leases, ReadLeases(root));
  std::map<LayerId, std::string> users;
  for (const Lease& lease : leases) {
    for (const LayerId& id : lease.layers) users.emplace(id, lease.node);
  }
  return users;
}

// True: no process that this one sees the locks of has the layer mounted. The lock stays with `fd`.
Result<bool> LockAlone(int dir, const std::string& hex, os::UniqueFd& fd) {
  const std::string manifest = hex + "/" + kManifestName;
  auto opened = os::OpenAt(dir, manifest.c_str(), O_RDONLY | O_NOFOLLOW);
  if (!opened.ok()) {
    const int error = opened.error().sys_errno();
    // Damaged: it cannot be mounted.
    if (error == ENOENT || error == ELOOP || error == ENOTDIR) return true;
    return std::move(opened).error();
  }
  fd = *std::move(opened);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  return StoreError("lock the layer");
}

// The milliseconds since 1970 at which NewUlid made it; 0 for what is none.
int64_t UlidMillis(std::string_view ulid) {
  constexpr std::string_view kDigits = "0123456789abcdefghjkmnpqrstvwxyz";
  int64_t millis = 0;
  for (const char digit : ulid.substr(0, 10)) {
    const size_t value = kDigits.find(digit);
    if (value == std::string_view::npos) return 0;
    millis = millis * 32 + static_cast<int64_t>(value);
  }
  return ulid.size() == 26 ? millis : 0;
}

}  // namespace

Result<os::UniqueFd> MakeAndOpenDir(int dirfd, const char* name, mode_t mode) {
  if (::mkdirat(dirfd, name, mode) != 0 && errno != EEXIST) {
    return StoreError(fmt::format("make folder {}", name));
  }
  return os::OpenAt(dirfd, name, O_RDONLY | O_DIRECTORY);
}

Error LayerInUse(const LayerId& id, std::string_view by) {
  return Error(Code::kConflict, "layer.in_use", fmt::format("{} is in use by {}", id.str(), by));
}

LayerStore::WorkDir::~WorkDir() {
  if (!fd.valid()) return;
  if (auto removed = os::RemoveTree(tmp, name.c_str()); !removed.ok()) {
    log::Warn("layer.work_folder_stays", {{"folder", name}, {"error", removed.error()}});
  }
}

Result<LayerStore::LeaseUse> LayerStore::LeaseUseOf(const LayerId& id) const {
  DSEC_TRY(const std::string boot_id, os::ReadBootId());
  DSEC_TRY(const auto leases, ReadLeases(root_));
  LeaseUse use;
  for (const Lease& lease : leases) {
    const bool listed = lease.layers.contains(id);
    const bool elsewhere = lease.boot_id != boot_id;
    use.files_stay = use.files_stay || listed || elsewhere;
    if (listed && elsewhere) use.elsewhere = lease.node;
  }
  return use;
}

Result<void> LayerStore::Condemn(const std::string& hex) const {
  DSEC_TRY(const auto condemned, MakeAndOpenDir(root_fd_.get(), kCondemnedName, 0700));
  const std::string name = hex + "." + NewUlid(clock_);
  if (::renameat(blobs_fd_.get(), hex.c_str(), condemned.get(), name.c_str()) != 0 &&
      errno != ENOENT)
    return StoreError("move a removed layer away");
  return Ok();
}

// With the lock of the store.
Result<void> LayerStore::RemoveLocked(const LayerId& id, const WorkDir& work, bool condemn) {
  const std::string hex = HexOf(id);
  // What can fail for want of room fails before anything is gone.
  if (condemn) {
    DSEC_TRY_VOID(MakeAndOpenDir(root_fd_.get(), kCondemnedName, 0700));
  }
  os::UniqueFd held;
  DSEC_TRY(const bool alone, LockAlone(blobs_fd_.get(), hex, held));
  if (!alone) return LayerInUse(id, "a mount of this node");
  ::unlinkat(work.fd.get(), kMovingName, 0);
  DSEC_TRY_VOID(os::CreateFile(work.fd.get(), kMovingName, hex, 0600));
  // What lies below it alone is nobody's from now on, not from when it was built.
  const auto known = catalog_->Find(id.str());
  if (known.ok() && !known->lower.empty())
    DSEC_TRY_VOID(catalog_->SeenInUse(known->lower, UnixMillis(clock_.Wall())));
  DSEC_TRY_VOID(catalog_->RemoveLayer(id));
  DSEC_FAULT_POINT("layer.remove.after_catalog");
  if (condemn) {
    if (!Condemn(hex).ok()) return FinishInterrupted(work.fd.get());
  } else {
    const std::string old = "old-" + hex;
    if (::renameat(blobs_fd_.get(), hex.c_str(), work.fd.get(), old.c_str()) != 0 &&
        errno != ENOENT)
      return FinishInterrupted(work.fd.get());
  }
  return Ok();
}

Result<CollectReport> LayerStore::Collect(const CollectOptions& options) {
  DSEC_TRY_VOID(Ready());
  CollectReport report;
  DSEC_TRY_VOID(CollectUnnamed(options, report));
  DSEC_TRY_VOID(DeleteCondemned(options, report));
  if (!options.dry_run) PruneIndex();
  return report;
}

Result<CollectReport> LayerStore::DeleteRemoved() const {
  DSEC_TRY_VOID(Ready());
  CollectReport report;
  DSEC_TRY_VOID(DeleteCondemned({}, report));
  if (report.deleted > 0) PruneIndex();
  return report;
}

Result<void> LayerStore::CollectUnnamed(const CollectOptions& options, CollectReport& report) {
  DSEC_TRY(const auto unnamed, catalog_->ListUnnamed());
  DSEC_TRY(const auto users, LeasedLayers(root_));
  const int64_t now = UnixMillis(clock_.Wall());
  std::vector<LayerId> in_use;
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  for (const Catalog::Unnamed& layer : unnamed) {
    if (const auto user = users.find(layer.id); user != users.end()) {
      report.in_use.emplace_back(layer.id, "node " + user->second);
      in_use.push_back(layer.id);
      continue;
    }
    if (layer.since_unix_ms + options.unnamed_for.count() > now) {
      ++report.young;
      continue;
    }
    if (!options.dry_run) {
      DSEC_TRY(const auto lock, Lock());  // for each: builds and removals go on in between
      auto still = catalog_->Find(layer.id.str());
      if (!still.ok() || !still->names.empty()) continue;
      DSEC_TRY(const auto upper, catalog_->UpperOf(layer.id));
      if (upper) continue;
      // Files wait for the next run in any case: a node that has just asked for this layer by its
      // id is then in its lease.
      auto removed = RemoveLocked(layer.id, work, true);
      if (!removed.ok() && removed.error().reason() == "layer.in_use") {
        report.in_use.emplace_back(layer.id, removed.error().message());
        in_use.push_back(layer.id);
        continue;
      }
      if (!removed.ok()) return removed;
    }
    report.removed.push_back(layer.id);
    report.removed_bytes += layer.bytes;
  }
  if (!options.dry_run && !in_use.empty()) return catalog_->SeenInUse(in_use, now);
  return Ok();
}

Result<void> LayerStore::DeleteCondemned(const CollectOptions& options,
                                         CollectReport& report) const {
  DSEC_TRY(const auto condemned, MakeAndOpenDir(root_fd_.get(), kCondemnedName, 0700));
  DSEC_TRY(const auto names, ListNames(condemned.get(), UINT64_MAX));
  if (names.empty()) return Ok();
  // After the files have left their place: who lists a layer later does not find them.
  DSEC_TRY(const auto users, LeasedLayers(root_));
  const int64_t now = UnixMillis(clock_.Wall());
  DSEC_TRY(const WorkDir work, MakeWorkDir());
  for (const std::string& name : names) {
    const size_t dot = name.find('.');
    const std::string hex = name.substr(0, dot);
    const int64_t since = dot == std::string::npos ? 0 : UlidMillis(name.substr(dot + 1));
    os::UniqueFd held;
    bool stays = !IsSha256Hex(hex) || since == 0 || since + options.grace.count() > now ||
                 users.contains(LayerId("sha256:" + hex));
    if (!stays) {
      DSEC_TRY(const bool alone, LockAlone(condemned.get(), name, held));
      stays = !alone;
    }
    if (stays || options.dry_run) {
      ++report.waiting;
      continue;
    }
    // By a rename, so that of two runs at once one deletes it; its content goes with `work`.
    if (::renameat(condemned.get(), name.c_str(), work.fd.get(), name.c_str()) != 0) {
      if (errno == ENOENT) continue;
      return StoreError("take a removed layer away");
    }
    ++report.deleted;
  }
  return Ok();
}

}  // namespace dsec::image
