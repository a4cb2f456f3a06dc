// SPDX-License-Identifier: Apache-2.0
#include "fn/artifact_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "base/log.h"
#include "fn/digest.h"
#include "os/file.h"

namespace dsec::fn {
namespace {

namespace stdfs = std::filesystem;

constexpr std::string_view kPrefix = "sha256:";

Error NotFound(std::string_view digest) {
  return Error(Code::kNotFound, "artifact.not_found",
               fmt::format("the node has no artefact {}", digest));
}

}  // namespace

Result<std::unique_ptr<ArtifactStore>> ArtifactStore::Open(const std::string& dir,
                                                           ArtifactBounds bounds,
                                                           FnMetrics& metrics) {
  std::error_code error;
  stdfs::create_directories(dir, error);
  if (error) {
    return Error(Code::kInternal, "fn.artifacts_dir", fmt::format("{}: {}", dir, error.message()));
  }
  DSEC_TRY(os::UniqueFd fd, os::OpenAt(AT_FDCWD, dir.c_str(), O_RDONLY | O_DIRECTORY));
  std::unique_ptr<ArtifactStore> store(new ArtifactStore(std::move(fd), bounds, metrics));
  DSEC_TRY_VOID(store->Load(dir));
  return store;
}

Result<void> ArtifactStore::Load(const std::string& dir) {
  struct Found {
    timespec used;
    std::string name;
    uint64_t size;
  };
  std::vector<Found> found;
  std::error_code error;
  for (stdfs::directory_iterator it(dir, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    struct stat info{};
    const bool known = fstatat(dir_.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 &&
                       S_ISREG(info.st_mode) && IsArtifactDigest(std::string(kPrefix) + name);
    if (known) {
      found.push_back({info.st_mtim, std::move(name), static_cast<uint64_t>(info.st_size)});
    } else if (auto removed = os::RemoveTree(dir_.get(), name.c_str()); !removed.ok()) {
      return std::move(removed).error();
    }
  }
  if (error) {
    return Error(Code::kInternal, "fn.artifacts_dir", fmt::format("{}: {}", dir, error.message()));
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  const std::lock_guard lock(mutex_);
  for (Found& item : found) InsertLocked(std::move(item.name), item.size);
  return {};
}

Result<std::string> ArtifactStore::Put(std::string_view bytes) {
  if (bytes.size() > bounds_.item_bytes || bytes.size() > bounds_.bytes) {
    return Error(Code::kResourceExhausted, "artifact.too_large",
                 fmt::format("{} bytes are more than {}", bytes.size(),
                             std::min(bounds_.item_bytes, bounds_.bytes)));
  }
  std::string digest = ArtifactDigest(bytes);
  const std::string name = digest.substr(kPrefix.size());
  if (Touch(name)) return digest;
  std::string partial;
  {
    const std::lock_guard lock(mutex_);
    partial = fmt::format(".{}.new", next_partial_++);
  }
  auto written = os::CreateFile(dir_.get(), partial.c_str(), bytes, 0600);
  if (written.ok()) {
    // Under the lock, so that whoever drops the same name does not remove this file.
    const std::lock_guard lock(mutex_);
    if (renameat(dir_.get(), partial.c_str(), dir_.get(), name.c_str()) == 0) {
      InsertLocked(name, bytes.size());
      return digest;
    }
    written = os::ErrnoError("fn.artifacts_dir", name);
  }
  (void)unlinkat(dir_.get(), partial.c_str(), 0);
  return std::move(written).error();
}

Result<std::string> ArtifactStore::Get(std::string_view digest) {
  if (!IsArtifactDigest(digest)) return NotFound(digest);
  const std::string name(digest.substr(kPrefix.size()));
  if (!Touch(name)) return NotFound(digest);
  const auto read = [&]() -> Result<std::string> {
    DSEC_TRY(const os::UniqueFd file, os::OpenAt(dir_.get(), name.c_str(), O_RDONLY | O_NOFOLLOW));
    DSEC_TRY(std::string found, os::ReadAll(file.get(), bounds_.item_bytes));
    if (ArtifactDigest(found) != digest) {
      return Error(Code::kInternal, "artifact.damaged", "it has other bytes");
    }
    // Its place in line after a restart.
    (void)futimens(file.get(), nullptr);
    return found;
  };
  auto bytes = read();
  if (bytes.ok()) return bytes;
  metrics_.artifacts_damaged.Add();
  log::Warn("fn.artifact_damaged", {{"artifact", digest}, {"error", bytes.error()}});
  Drop(name);
  return NotFound(digest);
}

bool ArtifactStore::Has(std::string_view digest) const {
  if (!digest.starts_with(kPrefix)) return false;
  const std::lock_guard lock(mutex_);
  return index_.contains(digest.substr(kPrefix.size()));
}

uint64_t ArtifactStore::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

bool ArtifactStore::Touch(std::string_view name) {
  const std::lock_guard lock(mutex_);
  const auto found = index_.find(name);
  if (found == index_.end()) return false;
  items_.splice(items_.end(), items_, found->second);
  return true;
}

void ArtifactStore::InsertLocked(std::string name, uint64_t size) {
  if (index_.contains(name)) return;  // another Put of the same bytes
  items_.push_back({std::move(name), size});
  const auto item = std::prev(items_.end());
  index_.emplace(item->name, item);
  bytes_ += size;
  while (bytes_ > bounds_.bytes || items_.size() > bounds_.count) DropLocked(items_.begin());
  metrics_.artifact_bytes.Set(static_cast<double>(bytes_));
}

void ArtifactStore::Drop(std::string_view name) {
  const std::lock_guard lock(mutex_);
  if (const auto found = index_.find(name); found != index_.end()) DropLocked(found->second);
}

void ArtifactStore::DropLocked(std::list<Item>::iterator item) {
  if (unlinkat(dir_.get(), item->name.c_str(), 0) != 0 && errno != ENOENT) {
    log::Warn("fn.artifact_not_removed", {{"artifact", item->name}, {"errno", errno}});
  }
  index_.erase(item->name);
  bytes_ -= item->size;
  items_.erase(item);
}

}  // namespace dsec::fn
