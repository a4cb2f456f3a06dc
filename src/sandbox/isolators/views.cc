// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/views.h"

#include <fcntl.h>
#include <sys/mount.h>

#include <algorithm>
#include <set>

#include "os/file.h"
#include "os/mount.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kMaxShapes = 64;
constexpr const char* kTargets[] = {"/sys", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
                                    "/proc/loadavg"};
constexpr uint64_t kAttributes =
    MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;

// The file system itself, not only its mounts: whatever mount of it a sandbox may come to have,
// nothing can be written that another would read.
Result<void> MakeReadOnly(int mount) {
  const os::UniqueFd context(::fspick(mount, "", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH));
  if (!context.valid()) return os::ErrnoError("views.fspick", "views");
  if (::fsconfig(context.get(), FSCONFIG_SET_FLAG, "ro", nullptr, 0) != 0 ||
      ::fsconfig(context.get(), FSCONFIG_CMD_RECONFIGURE, nullptr, nullptr, 0) != 0) {
    return os::ErrnoError("views.read_only", "views");
  }
  return Ok();
}

Result<os::UniqueFd> BuildTree(const std::vector<ViewFile>& files) {
  std::set<std::string> dirs;  // parents sort before what is below them
  uint64_t bytes = 0;
  for (const ViewFile& file : files) {
    for (size_t slash = file.path.find('/'); slash != std::string::npos;
         slash = file.path.find('/', slash + 1)) {
      dirs.insert(file.path.substr(0, slash));
    }
    bytes += (file.content.size() + 4095) / 4096 * 4096;
  }
  DSEC_TRY(auto context, os::FsContext::Open("tmpfs"));
  DSEC_TRY_VOID(context.SetString("mode", "0755"));
  DSEC_TRY_VOID(context.SetString("size", fmt::format("{}", bytes + 4096).c_str()));
  DSEC_TRY_VOID(
      context.SetString("nr_inodes", fmt::format("{}", files.size() + dirs.size() + 2).c_str()));
  DSEC_TRY(auto mount,
           std::move(context).Mount(MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC));
  for (const std::string& dir : dirs) DSEC_TRY_VOID(os::MakeDir(mount.get(), dir.c_str(), 0755));
  for (const ViewFile& file : files) {
    DSEC_TRY_VOID(os::CreateFile(mount.get(), file.path.c_str(), file.content, 0444));
  }
  DSEC_TRY_VOID(MakeReadOnly(mount.get()));
  return mount;
}

}  // namespace

Result<std::unique_ptr<Views>> Views::Open(const std::string& root, const std::string& attach) {
  constexpr size_t kMax = 16 << 20;
  HostFacts facts;
  DSEC_TRY(facts.cpuinfo, os::ReadFile(AT_FDCWD, (root + "/proc/cpuinfo").c_str(), kMax));
  DSEC_TRY(facts.stat, os::ReadFile(AT_FDCWD, (root + "/proc/stat").c_str(), kMax));
  const std::string thp = root + "/sys/kernel/mm/transparent_hugepage/";
  if (auto text = os::ReadFile(AT_FDCWD, (thp + "enabled").c_str(), 256); text.ok())
    facts.thp_enabled = *text;
  if (auto text = os::ReadFile(AT_FDCWD, (thp + "hpage_pmd_size").c_str(), 256); text.ok()) {
    facts.thp_pmd_size = *text;
  }
  return std::make_unique<Views>(std::move(facts), attach);
}

Result<std::vector<ViewMount>> Views::For(const ViewShape& shape, int user_ns) {
  DSEC_TRY(const auto tree, TreeFor(shape));
  std::vector<ViewMount> mounts;
  for (const char* target : kTargets) {
    DSEC_TRY(auto mount, os::CloneMount(tree->get(), target + 1, false));
    DSEC_TRY_VOID(os::SetMountAttributes(mount.get(), kAttributes, 0, user_ns));
    mounts.push_back({target, std::move(mount)});
  }
  return mounts;
}

Result<std::shared_ptr<const os::UniqueFd>> Views::TreeFor(const ViewShape& shape) {
  {
    const std::lock_guard lock(mutex_);
    const auto entry = std::ranges::find(entries_, shape, &Entry::shape);
    if (entry != entries_.end()) {
      entries_.splice(entries_.begin(), entries_, entry);
      return entry->tree;
    }
  }
  // Two that build the same shape at once both succeed; one of the trees is used by its own sandbox
  // only.
  DSEC_TRY(auto built, BuildTree(MakeViews(shape, facts_)));
  auto tree = std::make_shared<const os::UniqueFd>(std::move(built));
  const std::lock_guard lock(mutex_);
  if (!attach_.empty()) {
    const std::string path = fmt::format("{}/{}", attach_, attached_++);
    DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, path.c_str(), 0700));
    DSEC_TRY_VOID(os::MoveMount(tree->get(), AT_FDCWD, path.c_str()));
  }
  entries_.push_front({shape, tree});
  if (entries_.size() > kMaxShapes) entries_.pop_back();
  return tree;
}

}  // namespace dsec::sandbox
