// SPDX-License-Identifier: Apache-2.0
// Writable layers as folders with project quotas (xfs, or ext4 with the project feature and
// prjquota): bytes and inodes are bounded and counted by the file system, and df inside shows the
// layer's own figures.
#include <fcntl.h>
#include <linux/dqblk_xfs.h>
#include <linux/fs.h>
#include <linux/quota.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/log.h"
#include "os/file.h"
#include "sandbox/isolators/dir_list.h"
#include "sandbox/isolators/scratch.h"

namespace dsec::sandbox {
namespace {

constexpr uint32_t kFirstProject =
    0x44530000;  // "DS": far from what people number by hand in /etc/projid
constexpr uint32_t kProjects = 65536;
constexpr uint64_t kQuotaBlock = 1024;  // QIF_DQBLKSIZE
constexpr char kTrash[] = ".trash";

int QuotaCtl(int fd, uint32_t command, uint32_t project, void* argument) {
  return static_cast<int>(
      ::syscall(SYS_quotactl_fd, fd, QCMD(command, PRJQUOTA), project, argument));  // Linux 5.14
}

Error NotHere(std::string message) {
  return Error(Code::kFailedPrecondition, "scratch.none", "project quota: " + std::move(message));
}

// Gives `dir` a project that everything made below it inherits.
Result<void> SetProject(int dir, uint32_t project) {
  fsxattr attributes = {};
  if (::ioctl(dir, FS_IOC_FSGETXATTR, &attributes) != 0)
    return os::ErrnoError("scratch.project", "get");
  attributes.fsx_projid = project;
  attributes.fsx_xflags |= FS_XFLAG_PROJINHERIT;
  if (::ioctl(dir, FS_IOC_FSSETXATTR, &attributes) != 0)
    return os::ErrnoError("scratch.project", "set");
  return Ok();
}

Result<uint32_t> ProjectOf(int dir) {
  fsxattr attributes = {};
  if (::ioctl(dir, FS_IOC_FSGETXATTR, &attributes) != 0)
    return os::ErrnoError("scratch.project", "get");
  return attributes.fsx_projid;
}

class ProjectQuotaScratch final : public Scratch {
 public:
  static Result<std::unique_ptr<Scratch>> Open(const ScratchOptions& options) {
    std::unique_ptr<ProjectQuotaScratch> scratch(
        new ProjectQuotaScratch(options.state_dir + "/scratch"));
    DSEC_TRY_VOID(scratch->Prepare());
    return std::unique_ptr<Scratch>(std::move(scratch));
  }
  ~ProjectQuotaScratch() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    if (janitor_.joinable()) janitor_.join();
  }

  v1::Capability capability() const override {
    v1::Capability item;
    item.set_name("disk_quota");
    item.set_used("prjquota");
    item.set_ok(true);
    item.set_detail(fmt::format("project quota on {}: bytes and inodes", path_));
    return item;
  }
  uint64_t inode_cost_bytes() const override { return 0; }
  std::string space_path() const override { return path_; }

  Result<ScratchLayer> Create(const std::string& name, uint64_t bytes, uint64_t inodes,
                              uint32_t owner) override {
    DSEC_TRY_VOID(CheckName(name));
    DSEC_TRY_VOID(os::MakeDir(root_.get(), name.c_str(), 0700));
    auto layer = Furnish(name, bytes, inodes, owner);
    if (!layer.ok()) {
      const auto removed = Remove(name);
      if (!removed.ok())
        log::Warn("scratch.remove_failed", {{"name", name}, {"error", removed.error()}});
    }
    return layer;
  }

  Result<void> SetLimits(const std::string& name, uint64_t bytes, uint64_t inodes) override {
    DSEC_TRY(const uint32_t project, ProjectNamed(name));
    return Limit(project, bytes, inodes);
  }

  Result<ScratchUsage> Usage(const std::string& name) override {
    DSEC_TRY(const uint32_t project, ProjectNamed(name));
    if_dqblk quota = {};
    if (QuotaCtl(root_.get(), Q_GETQUOTA, project, &quota) != 0)
      return os::ErrnoError("scratch.usage", name);
    return ScratchUsage{quota.dqb_curspace, quota.dqb_curinodes};
  }

  Result<void> Remove(const std::string& name) override {
    DSEC_TRY_VOID(CheckName(name));
    const std::string to = fmt::format("{}/{}.{}", kTrash, name, ++trashed_);
    if (::renameat(root_.get(), name.c_str(), root_.get(), to.c_str()) != 0) {
      return errno == ENOENT ? Ok() : Result<void>(os::ErrnoError("scratch.remove", name));
    }
    Discard(to);
    return Ok();
  }

  Result<os::UniqueFd> OpenUpper(const std::string& name) override {
    DSEC_TRY_VOID(CheckName(name));
    DSEC_TRY(const auto dir,
             os::OpenAt(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    return os::OpenAt(dir.get(), "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  }

  bool copies() const override { return false; }
  Result<void> Copy(const std::string&, const std::string&) override {
    return Error(Code::kFailedPrecondition, "scratch.no_copies",
                 "project quota has no copies of a layer in constant time");
  }

  Result<std::vector<std::string>> List() override {
    DSEC_TRY(const auto entries, ListDir(root_.get(), "."));
    std::vector<std::string> names;
    for (const DirEntry& entry : entries) {
      if (entry.is_dir && entry.name != kTrash) names.push_back(entry.name);
    }
    return names;
  }

 private:
  explicit ProjectQuotaScratch(std::string path) : path_(std::move(path)) {}

  static Result<void> CheckName(const std::string& name) {
    if (name.empty() || name[0] == '.' || name.find('/') != std::string::npos) {
      return Error(Code::kInvalidArgument, "scratch.name",
                   fmt::format("'{}' names no layer", name));
    }
    return Ok();
  }

  Result<void> Prepare() {
    auto made = os::MakeDir(AT_FDCWD, path_.c_str(), 0700);
    const bool existed = !made.ok() && made.error().sys_errno() == EEXIST;
    if (!made.ok() && !existed) return std::move(made).error();
    DSEC_TRY(root_, os::OpenAt(AT_FDCWD, path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    auto usable = Probe();
    if (!usable.ok()) {
      if (!existed) ::rmdir(path_.c_str());
      return usable;
    }
    made = os::MakeDir(root_.get(), kTrash, 0700);
    if (!made.ok() && made.error().sys_errno() != EEXIST) return made;
    janitor_ = std::thread([this] { RunJanitor(); });
    DSEC_TRY(const auto left, ListDir(root_.get(), kTrash));
    for (const DirEntry& entry : left) Discard(fmt::format("{}/{}", kTrash, entry.name));
    return Ok();
  }

  Result<void> Probe() {
    fs_quota_statv state = {};
    state.qs_version = FS_QSTATV_VERSION1;
    if (QuotaCtl(root_.get(), Q_XGETQSTATV, 0, &state) != 0) {
      return NotHere(fmt::format("the file system of {} does not say ({})", path_,
                                 os::ErrnoError("scratch.probe", "Q_XGETQSTATV").message()));
    }
    constexpr uint16_t kOn = FS_QUOTA_PDQ_ACCT | FS_QUOTA_PDQ_ENFD;
    if ((state.qs_flags & kOn) != kOn) {
      return NotHere(
          fmt::format("not enforced on the file system of {} (mount option prjquota)", path_));
    }
    return Ok();
  }

  Result<ScratchLayer> Furnish(const std::string& name, uint64_t bytes, uint64_t inodes,
                               uint32_t owner) {
    DSEC_TRY(const auto dir,
             os::OpenAt(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    DSEC_TRY(const uint32_t project, TakeProject());
    // The quota first: an id that is 0 or without limits bounds nothing.
    DSEC_TRY_VOID(Limit(project, bytes, inodes));
    DSEC_TRY_VOID(SetProject(dir.get(), project));
    ScratchLayer layer;
    for (auto [part, fd] : {std::pair("upper", &layer.upper), std::pair("work", &layer.work)}) {
      DSEC_TRY_VOID(os::MakeDir(dir.get(), part, 0755));
      DSEC_TRY(*fd, os::OpenAt(dir.get(), part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
      if (::fchmod(fd->get(), 0755) != 0 || ::fchown(fd->get(), owner, owner) != 0) {
        return os::ErrnoError("scratch.owner", name);
      }
    }
    return layer;
  }

  // A project that no folder here bears, those in the trash included.
  Result<uint32_t> TakeProject() {
    const std::lock_guard lock(mutex_);
    std::vector<uint32_t> used;
    for (const char* folder : {".", kTrash}) {
      DSEC_TRY(const auto entries, ListDir(root_.get(), folder));
      for (const DirEntry& entry : entries) {
        auto dir = os::OpenAt(root_.get(), fmt::format("{}/{}", folder, entry.name).c_str(),
                              O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
        if (!dir.ok()) continue;
        const auto project = ProjectOf(dir->get());
        if (project.ok()) used.push_back(*project);
      }
    }
    for (uint32_t i = 0; i < kProjects; ++i) {
      const uint32_t project = kFirstProject + (next_project_ + i) % kProjects;
      if (std::ranges::find(used, project) != used.end()) continue;
      next_project_ = project - kFirstProject + 1;
      return project;
    }
    return Error(Code::kResourceExhausted, "scratch.projects", "no project id is free");
  }

  Result<uint32_t> ProjectNamed(const std::string& name) {
    DSEC_TRY_VOID(CheckName(name));
    DSEC_TRY(const auto dir,
             os::OpenAt(root_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    return ProjectOf(dir.get());
  }

  Result<void> Limit(uint32_t project, uint64_t bytes, uint64_t inodes) {
    if_dqblk quota = {};
    quota.dqb_bhardlimit = bytes / kQuotaBlock;
    quota.dqb_ihardlimit = inodes;
    quota.dqb_valid = QIF_LIMITS;
    if (QuotaCtl(root_.get(), Q_SETQUOTA, project, &quota) != 0) {
      return os::ErrnoError("scratch.limit", fmt::format("project {}", project));
    }
    return Ok();
  }

  void Discard(std::string path) {
    {
      const std::lock_guard lock(mutex_);
      trash_.push_back(std::move(path));
    }
    wake_.notify_one();
  }

  // What is not removed by the end is found in the trash by the next process.
  void RunJanitor() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closing_ || !trash_.empty(); });
      if (closing_) return;
      const std::string path = std::move(trash_.front());
      trash_.pop_front();
      lock.unlock();
      auto dir = os::OpenAt(root_.get(), path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
      const auto project = dir.ok() ? ProjectOf(dir->get()) : Result<uint32_t>(0u);
      auto removed = os::RemoveTree(root_.get(), path.c_str());
      if (!removed.ok())
        log::Warn("scratch.remove_failed", {{"path", path}, {"error", removed.error()}});
      // A project without limits and files drops out of the quota file.
      if (removed.ok() && project.ok() && *project >= kFirstProject) {
        const auto cleared = Limit(*project, 0, 0);
        if (!cleared.ok())
          log::Warn("scratch.limit_failed", {{"path", path}, {"error", cleared.error()}});
      }
      lock.lock();
    }
  }

  const std::string path_;
  os::UniqueFd root_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool closing_ = false;
  std::deque<std::string> trash_;
  uint32_t next_project_ = 0;
  std::atomic<uint64_t> trashed_ = static_cast<uint64_t>(::getpid()) << 32;
  std::thread janitor_;
};

}  // namespace

Result<std::unique_ptr<Scratch>> OpenProjectQuotaScratch(const ScratchOptions& options) {
  return ProjectQuotaScratch::Open(options);
}

Result<std::unique_ptr<Scratch>> OpenScratch(const ScratchOptions& options) {
  auto quota = OpenProjectQuotaScratch(options);
  if (quota.ok() || quota.error().code() != Code::kFailedPrecondition) return quota;
  auto image = OpenBtrfsScratch(options);
  if (image.ok() || image.error().code() != Code::kFailedPrecondition) return image;
  return Error(Code::kFailedPrecondition, "scratch.none",
               fmt::format("no way to bound writable layers: {}; {}", quota.error().message(),
                           image.error().message()));
}

}  // namespace dsec::sandbox
