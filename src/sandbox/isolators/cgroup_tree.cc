// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/cgroup_tree.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <thread>

#include "base/log.h"
#include "os/file.h"
#include "os/mount.h"
#include "os/process.h"
#include "sandbox/isolators/control_file.h"
#include "sandbox/isolators/dir_list.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kMaxControlFile = 1 << 20;
constexpr uint64_t kCpuPeriodUsec = 100'000;
// What a hostile agent can make of its directory: the execs that init allows, and the three that
// are ours.
constexpr std::string_view kMaxDescendants = "4200";
constexpr std::string_view kMaxDepth = "2";
// The sandbox's init is in the group but not among the processes that the limit promises.
constexpr uint64_t kInitProcesses = 1;

Error Unusable(std::string message) {
  return Error(Code::kFailedPrecondition, "cgroup.unusable", std::move(message));
}

Result<std::string> Read(int dir, const std::string& path) {
  return os::ReadFile(dir, path.c_str(), kMaxControlFile);
}

Result<void> Write(int dir, const std::string& path, std::string_view value) {
  return os::WriteExisting(dir, path.c_str(), value).Context("write {} to {}", value, path);
}

bool Holds(int dir, const std::string& path, const std::string& value) {
  const auto now = os::ReadFile(dir, path.c_str(), kMaxControlFile);
  return now.ok() && *now == value + "\n";
}

Result<void> WriteChange(int dir, const std::string& path, const std::string& value) {
  return Holds(dir, path, value) ? Ok() : Write(dir, path, value);
}

bool Exists(int dir, const std::string& path) {
  return ::faccessat(dir, path.c_str(), F_OK, 0) == 0;
}

bool HasWord(std::string_view text, std::string_view word, char separator) {
  while (!text.empty()) {
    const size_t end = text.find(separator);
    if (text.substr(0, end) == word) return true;
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return false;
}

Result<os::UniqueFd> OpenDir(int dir, const std::string& path) {
  return os::OpenAt(dir, path.c_str(), O_RDONLY | O_DIRECTORY);
}

Result<void> Own(int dir, const std::string& path, uint32_t id) {
  if (::fchownat(dir, path.c_str(), id, id, AT_SYMLINK_NOFOLLOW) != 0) {
    return os::ErrnoError("cgroup.chown", path);
  }
  return Ok();
}

}  // namespace

Result<void> CgroupFs::Make(int parent, const char* name) {
  return os::MakeDir(parent, name, 0755);
}

Result<void> CgroupFs::Remove(int parent, const char* name) {
  if (::unlinkat(parent, name, AT_REMOVEDIR) != 0 && errno != ENOENT) {
    return os::ErrnoError("cgroup.rmdir", name);
  }
  return Ok();
}

struct CgroupTree::MountPoint {
  std::string device;  // major:minor, the same for every mount of one hierarchy
  std::string root;    // of the hierarchy, as this mount shows it
  std::string path;
  std::string type;
  std::string options;

  // Fields of proc_pid_mountinfo(5). False for what is no cgroup file system.
  bool Parse(std::string_view line) {
    std::vector<std::string_view> words;
    while (!line.empty()) {
      const size_t end = line.find(' ');
      words.push_back(line.substr(0, end));
      line.remove_prefix(end == std::string_view::npos ? line.size() : end + 1);
    }
    const auto dash = std::ranges::find(words, std::string_view("-"));
    if (words.size() < 6 || words.end() - dash < 4) return false;
    type = dash[1];
    if (type != "cgroup" && type != "cgroup2") return false;
    device = words[2];
    root = words[3];
    path = words[4];
    options = dash[3];
    return true;
  }
};

CgroupTree::CgroupTree(const CgroupOptions& options)
    : options_(options), fs_(options.fs != nullptr ? *options.fs : kernel_) {}

Result<std::unique_ptr<CgroupTree>> CgroupTree::Open(const CgroupOptions& options) {
  std::unique_ptr<CgroupTree> tree(new CgroupTree(options));
  DSEC_TRY_VOID(tree->FindHierarchies());
  return tree;
}

Result<void> CgroupTree::FindHierarchies() {
  DSEC_TRY(const auto text,
           os::ReadFile(AT_FDCWD, (options_.root + "/proc/self/mountinfo").c_str(), 16 << 20));
  std::vector<MountPoint> mounts;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = rest.find('\n');
    MountPoint mount;
    // A mount of a part of a hierarchy is somebody's view of it, not the place to build.
    if (mount.Parse(rest.substr(0, end)) && mount.root == "/") mounts.push_back(std::move(mount));
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  const auto unified = std::ranges::find(mounts, "cgroup2", &MountPoint::type);
  DSEC_TRY_VOID(OpenUnified(unified == mounts.end() ? nullptr : &*unified));

  std::vector<std::string> devices;  // of v1_tops_
  for (auto [name, place] :
       {std::pair("memory", &memory_), std::pair("cpu", &cpu_), std::pair("pids", &pids_)}) {
    if (place->v2) continue;
    const auto mount =
        std::ranges::find_if(mounts, [controller = name](const MountPoint& candidate) {
          return candidate.type == "cgroup" && HasWord(candidate.options, controller, ',');
        });
    if (mount == mounts.end()) continue;
    const auto known = std::ranges::find(devices, mount->device);
    place->v1_top = static_cast<int>(known - devices.begin());
    if (known != devices.end()) continue;
    DSEC_TRY(const auto root, OpenDir(AT_FDCWD, options_.root + mount->path));
    DSEC_TRY(auto top, OpenTop(root.get()));
    devices.push_back(mount->device);
    v1_tops_.push_back(std::move(top));
  }
  driver_ = v1_tops_.empty() ? "v2" : unified == mounts.end() ? "v1" : "hybrid";
  if (memory_.v1_top >= 0) {
    swap_bounded_ = Exists(DirOf(memory_), "memory.memsw.limit_in_bytes");
  } else {
    swap_bounded_ = memory_.v2;
  }
  burst_ = cpu_.found() && Exists(DirOf(cpu_), cpu_.v2 ? "cpu.max.burst" : "cpu.cfs_burst_us");
  return Ok();
}

Result<void> CgroupTree::OpenUnified(const MountPoint* mounted) {
  os::UniqueFd root;
  if (mounted != nullptr) {
    DSEC_TRY(root, OpenDir(AT_FDCWD, options_.root + mounted->path));
  } else {
    auto context = os::FsContext::Open("cgroup2");
    if (!context.ok()) {
      return Unusable("no cgroup v2 hierarchy is mounted and the kernel has none: " +
                      context.error().message());
    }
    DSEC_TRY(const auto mount,
             std::move(*context).Mount(MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC));
    DSEC_TRY(root, OpenDir(mount.get(), "."));
  }
  // Linux 5.14
  if (!Exists(root.get(), "cgroup.controllers")) {
    return Unusable("the cgroup v2 hierarchy has no cgroup.controllers");
  }
  DSEC_TRY(std::string controllers, Read(root.get(), "cgroup.controllers"));
  while (!controllers.empty() && controllers.back() == '\n') controllers.pop_back();
  for (auto [name, place] :
       {std::pair("memory", &memory_), std::pair("cpu", &cpu_), std::pair("pids", &pids_)}) {
    place->v2 = HasWord(controllers, name, ' ');
    if (place->v2)
      v2_controllers_ += fmt::format("{}+{}", v2_controllers_.empty() ? "" : " ", name);
  }
  DSEC_TRY_VOID(EnableControllers(root.get(), "the root"));
  DSEC_TRY(unified_, OpenTop(root.get()));
  if (!Exists(unified_.get(), "cgroup.kill")) {
    return Unusable("the kernel has no cgroup.kill (Linux 5.14)");
  }
  return EnableControllers(unified_.get(), options_.node_dir);
}

Result<void> CgroupTree::EnableControllers(int dir, const std::string& path) const {
  if (v2_controllers_.empty()) return Ok();
  return Write(dir, "cgroup.subtree_control", v2_controllers_).Context("in {}", path);
}

Result<os::UniqueFd> CgroupTree::OpenTop(int root) {
  const char* name = options_.node_dir.c_str();
  auto made = fs_.Make(root, name);
  if (!made.ok() && made.error().sys_errno() != EEXIST) return std::move(made).error();
  return OpenDir(root, options_.node_dir);
}

int CgroupTree::DirOf(const Place& place) const {
  return place.v2 ? unified_.get() : v1_tops_[static_cast<size_t>(place.v1_top)].get();
}

std::string CgroupTree::PathOf(const Place& place, const std::string& slot) const {
  return place.v2 ? slot + "/code" : slot;
}

std::string CgroupTree::MemoryUnenforceable() const {
  return memory_.found() ? "" : "the host has no memory controller";
}
std::string CgroupTree::CpuUnenforceable() const {
  return cpu_.found() ? "" : "the host has no cpu controller";
}
std::string CgroupTree::PidsUnenforceable() const {
  return pids_.found() ? "" : "the host has no pids controller";
}

std::vector<v1::Capability> CgroupTree::Capabilities() const {
  std::vector<v1::Capability> all;
  auto add = [&](const char* name, const Place& place, std::string detail) {
    v1::Capability& item = all.emplace_back();
    item.set_name(name);
    item.set_used(!place.found() ? "none" : place.v2 ? "v2" : "v1");
    item.set_ok(place.found());
    item.set_detail(place.found()
                        ? std::move(detail)
                        : "missing: no such controller on this host; every create is refused");
  };
  v1::Capability& tree = all.emplace_back();
  tree.set_name("cgroup.tree");
  tree.set_used(std::string(driver_));
  tree.set_ok(true);
  tree.set_detail(
      driver_ == "v2" ? "one hierarchy"
      : driver_ == "hybrid"
          ? "v2 for exec trees, kill and device rules; v1 controllers for limits: one more "
            "directory and migration a controller and slot"
          : "v1 controllers; v2 is not mounted on the host, a detached mount of it serves "
            "exec trees, kill and device rules");
  add("cgroup.memory", memory_,
      swap_bounded_ ? "memory, page cache, tmpfs and swap in one bound"
                    : "swap is not accounted here (swapaccount=0): sandboxes do not swap instead");
  add("cgroup.cpu", cpu_, burst_ ? "quota with burst" : "quota; no burst (Linux 5.14)");
  add("cgroup.pids", pids_, "processes and threads");
  return all;
}

Result<SlotCgroups> CgroupTree::Make(const SlotName& name, uint32_t agent_uid, uint32_t id_base) {
  const std::string slot = name.str();
  const int top = unified_.get();
  const std::string code = slot + "/code";
  SlotCgroups made;
  DSEC_TRY_VOID(fs_.Make(top, slot.c_str()));
  DSEC_TRY_VOID(EnableControllers(top, slot));
  DSEC_TRY(made.slot, OpenDir(top, slot));
  DSEC_TRY_VOID(Write(made.slot.get(), "cgroup.max.descendants", kMaxDescendants));
  DSEC_TRY_VOID(Write(made.slot.get(), "cgroup.max.depth", kMaxDepth));
  if (!v2_controllers_.empty()) {
    DSEC_TRY_VOID(Write(made.slot.get(), "cgroup.subtree_control", v2_controllers_));
  }
  DSEC_TRY_VOID(fs_.Make(made.slot.get(), "agent"));
  DSEC_TRY_VOID(fs_.Make(made.slot.get(), "code"));
  if (!v2_controllers_.empty()) {
    DSEC_TRY_VOID(Write(made.slot.get(), "code/cgroup.subtree_control", v2_controllers_));
  }
  DSEC_TRY_VOID(fs_.Make(made.slot.get(), "code/init"));
  DSEC_TRY(made.agent, OpenDir(made.slot.get(), "agent"));
  DSEC_TRY(made.init, OpenDir(made.slot.get(), "code/init"));
  // The agent makes directories for execs; init clones from code/init into them, which asks for the
  // common ancestor code/ as well. The files that hold limits stay root's.
  for (const char* path :
       {".", "cgroup.procs", "agent/cgroup.procs", "code", "code/init", "code/init/cgroup.procs"}) {
    DSEC_TRY_VOID(Own(made.slot.get(), path, agent_uid));
  }
  DSEC_TRY_VOID(Own(made.slot.get(), "code/cgroup.procs", id_base));

  for (const os::UniqueFd& v1_top : v1_tops_) {
    DSEC_TRY_VOID(fs_.Make(v1_top.get(), slot.c_str()));
    DSEC_TRY(auto procs, os::OpenAt(v1_top.get(), (slot + "/cgroup.procs").c_str(), O_WRONLY));
    made.v1_procs.push_back(std::move(procs));
  }
  for (auto [place, fd] : {std::pair(&memory_, &made.memory), std::pair(&pids_, &made.pids),
                           std::pair(&cpu_, &made.cpu)}) {
    if (place->v1_top < 0) continue;
    DSEC_TRY(*fd, OpenDir(DirOf(*place), slot));
  }
  // What the last sandbox had, the next one is likely to have. A worker has no bandwidth of its
  // own.
  if (cpu_.found() && name.kind == SlotKind::kSandbox)
    DSEC_TRY_VOID(SetCpu(slot, *likely_cpu_millis_));
  // With it the agent asks v1 to be told of an OOM at once; v2 tells without.
  constexpr char kEventControl[] = "cgroup.event_control";
  if (made.memory.valid() && Exists(made.memory.get(), kEventControl)) {
    DSEC_TRY_VOID(Own(made.memory.get(), kEventControl, agent_uid));
  }
  return made;
}

Result<void> CgroupTree::SetLimits(const SlotName& name, const v1::Limits& limits) {
  const std::string slot = name.str();
  DSEC_TRY_VOID(SetMemory(slot, limits.memory_bytes()));
  DSEC_TRY_VOID(SetCpu(slot, limits.cpu_millis()));
  *likely_cpu_millis_ = limits.cpu_millis();
  return Write(DirOf(pids_), PathOf(pids_, slot) + "/pids.max",
               fmt::format("{}", limits.pids() + kInitProcesses));
}

Result<void> CgroupTree::SetMemory(const std::string& slot, uint64_t bytes) {
  const int dir = DirOf(memory_);
  const std::string path = PathOf(memory_, slot);
  const std::string value = fmt::format("{}", bytes);
  if (memory_.v2) {
    DSEC_TRY_VOID(Write(dir, path + "/memory.max", value));
    // Absent where the host runs without swap accounting, which needs no bound.
    if (!Exists(dir, path + "/memory.swap.max")) return Ok();
    return Write(dir, path + "/memory.swap.max", "0");
  }
  const std::string plain = path + "/memory.limit_in_bytes";
  if (!swap_bounded_) {
    DSEC_TRY_VOID(Write(dir, plain, value));
    return Write(dir, path + "/memory.swappiness", "0");
  }
  // The kernel keeps limit_in_bytes <= memsw at every moment: the one that makes room goes first.
  const std::string with_swap = path + "/memory.memsw.limit_in_bytes";
  DSEC_TRY(const auto now, Read(dir, with_swap));
  const bool raise = ControlValue(now) < bytes;
  DSEC_TRY_VOID(Write(dir, raise ? with_swap : plain, value));
  return Write(dir, raise ? plain : with_swap, value);
}

Result<void> CgroupTree::SetCpu(const std::string& slot, uint64_t millis) {
  const int dir = DirOf(cpu_);
  const std::string path = PathOf(cpu_, slot);
  const uint64_t quota = millis * kCpuPeriodUsec / 1000;
  // Unused quota carries over into one period at most, so that short bursts are not throttled.
  // Never more than the quota, so it goes first.
  const std::string burst = path + (cpu_.v2 ? "/cpu.max.burst" : "/cpu.cfs_burst_us");
  const std::string limit = path + (cpu_.v2 ? "/cpu.max" : "/cpu.cfs_quota_us");
  const std::string value =
      cpu_.v2 ? fmt::format("{} {}", quota, kCpuPeriodUsec) : fmt::format("{}", quota);
  const std::string carried = fmt::format("{}", quota);
  // Each of these writes walks all groups of the host (walk_tg_tree in kernel/sched).
  if (!Holds(dir, limit, value) || (burst_ && !Holds(dir, burst, carried))) {
    if (burst_) DSEC_TRY_VOID(WriteChange(dir, burst, "0"));
    if (!cpu_.v2) {
      DSEC_TRY_VOID(
          WriteChange(dir, path + "/cpu.cfs_period_us", fmt::format("{}", kCpuPeriodUsec)));
    }
    DSEC_TRY_VOID(Write(dir, limit, value));
    if (burst_) DSEC_TRY_VOID(Write(dir, burst, carried));
  }
  if (cpu_.v2) {
    return Write(dir, path + "/cpu.weight",
                 fmt::format("{}", std::clamp<uint64_t>(millis / 10, 1, 10000)));
  }
  return Write(dir, path + "/cpu.shares",
               fmt::format("{}", std::clamp<uint64_t>(millis * 1024 / 1000, 2, 262144)));
}

Result<void> CgroupTree::ReadUsage(const SlotName& name, v1::Usage& usage) const {
  const std::string slot = name.str();
  usage.set_cpu_usec(ReadControl(unified_.get(), slot + "/code/cpu.stat", "usage_usec"));
  if (cpu_.found()) {
    const std::string stat = PathOf(cpu_, slot) + "/cpu.stat";
    usage.set_throttled_usec(cpu_.v2 ? ReadControl(DirOf(cpu_), stat, "throttled_usec")
                                     : ReadControl(DirOf(cpu_), stat, "throttled_time") / 1000);
  }
  if (memory_.found()) {
    const int dir = DirOf(memory_);
    const std::string path = PathOf(memory_, slot) + (memory_.v2 ? "/memory." : "/memory.");
    usage.set_memory_bytes(ReadControl(dir, path + (memory_.v2 ? "current" : "usage_in_bytes")));
    usage.set_memory_peak_bytes(
        ReadControl(dir, path + (memory_.v2 ? "peak" : "max_usage_in_bytes")));
    usage.set_oom_kills(
        ReadControl(dir, path + (memory_.v2 ? "events" : "oom_control"), "oom_kill"));
  }
  if (pids_.found()) {
    const std::string path = PathOf(pids_, slot);
    const uint64_t count = ReadControl(DirOf(pids_), path + "/pids.current");
    usage.set_pids(count > kInitProcesses ? count - kInitProcesses : 0);
    usage.set_pids_denied(ReadControl(DirOf(pids_), path + "/pids.events", "max"));
  }
  return Ok();
}

Result<DyingSlot> CgroupTree::Kill(const SlotName& name) const {
  const std::string slot = name.str();
  DyingSlot dying;
  if (const auto text = Read(unified_.get(), slot + "/agent/cgroup.procs"); text.ok()) {
    const auto pid = static_cast<pid_t>(ControlValue(*text));
    if (pid > 0) {
      auto agent = os::PidFd::Open(pid);
      if (agent.ok()) dying.agent = std::move(*agent);
    }
  }
  auto killed = Write(unified_.get(), slot + "/cgroup.kill", "1");
  if (!killed.ok() && killed.error().sys_errno() != ENOENT &&
      killed.error().sys_errno() != ENODEV) {
    return std::move(killed).error();
  }
  auto events = os::OpenAt(unified_.get(), (slot + "/cgroup.events").c_str(), O_RDONLY);
  if (events.ok()) {
    dying.events = std::move(*events);
  } else if (events.error().sys_errno() != ENOENT) {
    return std::move(events).error();
  }
  return dying;
}

Result<bool> CgroupTree::IsEmpty(int events) {
  char text[256];
  const ssize_t size = ::pread(events, text, sizeof(text), 0);
  if (size < 0) {
    if (errno == ENODEV) return true;  // removed meanwhile
    return os::ErrnoError("cgroup.read", "cgroup.events");
  }
  return ControlValue({text, static_cast<size_t>(size)}, "populated") == 0;
}

Result<bool> CgroupTree::WaitGone(const DyingSlot& dying, MonoTime deadline) {
  while (dying.events.valid()) {
    DSEC_TRY(const bool empty, IsEmpty(dying.events.get()));
    if (empty) break;
    const auto left = deadline - Clock::System().Mono();
    if (left <= std::chrono::nanoseconds::zero()) return false;
    const auto left_ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    // POLLPRI comes with the next change after the read (cgroup-v2.rst).
    pollfd item = {dying.events.get(), POLLPRI, 0};
    ::poll(&item, 1, static_cast<int>(std::min<int64_t>(left_ms, 60'000)));
  }
  if (!dying.agent.valid()) return true;
  return dying.agent.WaitExit(deadline);
}

Result<std::vector<int>> CgroupTree::Processes(const SlotName& name) const {
  std::vector<int> pids;
  auto add = [&pids](int dir, const std::string& path) -> Result<void> {
    auto text = Read(dir, path);
    if (!text.ok()) {
      const int error = text.error().sys_errno();
      return error == ENOENT || error == ENODEV ? Ok() : Result<void>(std::move(text).error());
    }
    std::string_view rest = *text;
    for (std::string_view word = TakeWord(rest); !word.empty(); word = TakeWord(rest)) {
      const int pid = static_cast<int>(ToNumber(word));
      if (pid > 0) pids.push_back(pid);
    }
    return Ok();
  };
  const std::string slot = name.str();
  for (const os::UniqueFd& top : v1_tops_) DSEC_TRY_VOID(add(top.get(), slot + "/cgroup.procs"));
  for (const char* part : {"", "/agent", "/code"}) {
    DSEC_TRY_VOID(add(unified_.get(), slot + part + "/cgroup.procs"));
  }
  auto execs = ListDir(unified_.get(), (slot + "/code").c_str());
  if (execs.ok()) {
    for (const DirEntry& entry : *execs) {
      if (!entry.is_dir) continue;
      DSEC_TRY_VOID(add(unified_.get(), fmt::format("{}/code/{}/cgroup.procs", slot, entry.name)));
    }
  }
  std::ranges::sort(pids);
  pids.erase(std::unique(pids.begin(), pids.end()), pids.end());
  return pids;
}

Result<void> CgroupTree::Remove(const SlotName& name, MonoTime deadline) {
  const std::string slot = name.str();
  // v2 last: its directory is what a sweep looks for first, and where processes can be waited for.
  for (const os::UniqueFd& top : v1_tops_) DSEC_TRY_VOID(RemoveV1(top.get(), slot, deadline));
  return RemoveV2(slot, deadline);
}

Result<void> CgroupTree::RemoveV1(int top, const std::string& slot, MonoTime deadline) {
  while (true) {
    auto removed = fs_.Remove(top, slot.c_str());
    if (removed.ok() || removed.error().sys_errno() != EBUSY) return removed;
    // Something is still in it. All that the sandbox started is also in the v2 directory and was
    // killed there; what is left has been moved in by hand, or is on its way out.
    DSEC_TRY(const auto text, Read(top, slot + "/cgroup.procs"));
    std::string_view rest = text;
    const auto pid = static_cast<pid_t>(ToNumber(TakeWord(rest)));
    if (pid <= 0) {
      // A process that has just ended is listed no more, and counts until it is off its core.
      constexpr auto kPause = std::chrono::milliseconds(1);
      if (Clock::System().Mono() < deadline) {
        std::this_thread::sleep_for(kPause);
        continue;
      }
      return Error(Code::kDeadlineExceeded, "cgroup.busy",
                   fmt::format("{} cannot be removed though no process is in it", slot))
          .WithErrno(EBUSY);
    }
    auto process = os::PidFd::Open(pid);
    if (!process.ok()) continue;  // gone meanwhile
    DSEC_TRY_VOID(process->Signal(SIGKILL));
    DSEC_TRY(const bool ended, process->WaitExit(deadline));
    if (!ended) {
      return Error(Code::kDeadlineExceeded, "cgroup.busy",
                   fmt::format("process {} in {} does not end", pid, slot));
    }
  }
}

Result<void> CgroupTree::RemoveV2(const std::string& slot, MonoTime deadline) {
  const SlotName name = SlotName::Parse(slot).value();
  // The agent owns slot/ and may have made directories of its own, cgroup.max.depth deep.
  std::vector<std::string> groups;
  auto add_below = [&](const std::string& parent, auto&& self, int depth) -> void {
    const auto entries = ListDir(unified_.get(), parent.c_str());
    if (!entries.ok()) return;
    for (const DirEntry& entry : *entries) {
      if (!entry.is_dir) continue;
      const std::string path = fmt::format("{}/{}", parent, entry.name);
      if (depth > 1) self(path, self, depth - 1);
      groups.push_back(path);
    }
  };
  add_below(slot, add_below, 2);
  groups.push_back(slot);
  for (const std::string& group : groups) {
    auto removed = fs_.Remove(unified_.get(), group.c_str());
    if (removed.ok()) continue;
    if (removed.error().sys_errno() != EBUSY) return removed;
    DSEC_TRY(const auto dying, Kill(name));
    DSEC_TRY(const bool gone, WaitGone(dying, deadline));
    if (gone) removed = fs_.Remove(unified_.get(), group.c_str());
    if (removed.ok()) continue;
    DSEC_TRY(auto pids, Processes(name));
    if (pids.size() > 8) pids.resize(8);
    return Error(Code::kDeadlineExceeded, "cgroup.busy",
                 fmt::format("{} cannot be removed, processes in it: {}", group,
                             fmt::join(pids, " ")))
        .WithErrno(EBUSY);
  }
  return Ok();
}

Result<std::vector<SlotName>> CgroupTree::List() const {
  std::vector<SlotName> names;
  auto add = [&names](int top) -> Result<void> {
    DSEC_TRY(const auto entries, ListDir(top, "."));
    for (const DirEntry& entry : entries) {
      const auto name = SlotName::Parse(entry.name);
      if (entry.is_dir && name.has_value()) names.push_back(*name);
    }
    return Ok();
  };
  DSEC_TRY_VOID(add(unified_.get()));
  for (const os::UniqueFd& top : v1_tops_) DSEC_TRY_VOID(add(top.get()));
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Result<std::vector<std::string>> CgroupTree::Sweep(
    SlotKind kind, const std::function<bool(const SlotName&)>& owned, MonoTime deadline) {
  const auto remove = [&](const SlotName& slot) -> Result<size_t> {
    DSEC_TRY(const auto processes, Processes(slot));
    DSEC_TRY(const auto dying, Kill(slot));
    DSEC_TRY_VOID(WaitGone(dying, deadline));
    DSEC_TRY_VOID(Remove(slot, deadline));
    return processes.size();
  };
  std::vector<std::string> lines;
  DSEC_TRY(const auto found, List());
  for (const SlotName& slot : found) {
    if (slot.kind != kind || owned(slot)) continue;
    const auto killed = remove(slot);
    if (killed.ok()) {
      lines.push_back(
          fmt::format("cgroup {}: killed {} processes and removed it", slot.str(), *killed));
    } else {
      // The others have nothing to do with it; the next sweep tries again.
      log::Warn("sweep.failed", {{"slot", slot.str()}, {"error", killed.error()}});
    }
  }
  return lines;
}

Result<void> CgroupTree::RemoveTop() {
  auto remove = [this](int top) -> Result<void> {
    DSEC_TRY(const auto parent, OpenDir(top, ".."));
    return fs_.Remove(parent.get(), options_.node_dir.c_str());
  };
  for (const os::UniqueFd& top : v1_tops_) DSEC_TRY_VOID(remove(top.get()));
  return remove(unified_.get());
}

}  // namespace dsec::sandbox
