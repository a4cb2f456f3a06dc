// SPDX-License-Identifier: Apache-2.0
#include "sandbox/isolators/standard.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>

#include "base/log.h"
#include "base/units.h"
#include "os/file.h"

namespace dsec::sandbox {
namespace {

void LowerMax(model::LimitRule& rule, uint64_t max) {
  rule.max = std::min(rule.max, std::max(max, rule.min));
  rule.fallback = std::min(rule.fallback, rule.max);
}

class CgroupIsolator final : public Isolator {
 public:
  explicit CgroupIsolator(CgroupTree& tree) : tree_(tree) {}
  std::string_view name() const override { return "cgroup"; }
  std::vector<v1::Capability> Capabilities() const override { return tree_.Capabilities(); }

  void Restrict(model::LimitsPolicy& policy) const override {
    policy.memory_bytes.unenforceable = tree_.MemoryUnenforceable();
    policy.cpu_millis.unenforceable = tree_.CpuUnenforceable();
    policy.pids.unenforceable = tree_.PidsUnenforceable();
  }

  Result<void> Isolate(const Subject& subject, SlotParts& parts) override {
    DSEC_TRY(parts.cgroups, tree_.Make(subject.slot, parts.plan.agent_uid, parts.plan.id_base));
    parts.plan.slot_dir_fd = parts.cgroups.slot.get();
    parts.plan.agent_dir_fd = parts.cgroups.agent.get();
    parts.plan.init_dir_fd = parts.cgroups.init.get();
    parts.plan.memory_dir_fd = parts.cgroups.memory.get();
    parts.plan.pids_dir_fd = parts.cgroups.pids.get();
    parts.plan.cpu_dir_fd = parts.cgroups.cpu.get();
    for (const os::UniqueFd& procs : parts.cgroups.v1_procs)
      parts.plan.v1_procs_fds.push_back(procs.get());
    return Ok();
  }
  Result<void> Prepare(const Subject& subject, LaunchParts&) override {
    return tree_.SetLimits(subject.slot, subject.limits);
  }
  Result<void> Update(const Subject& subject) override {
    return tree_.SetLimits(subject.slot, subject.limits);
  }
  Result<void> Usage(const Subject& subject, v1::Usage& usage) override {
    return tree_.ReadUsage(subject.slot, usage);
  }
  void Watch(const v1::Limits&, const v1::Usage& before, const v1::Usage& now,
             std::vector<LimitHit>& hits) const override {
    if (now.oom_kills() > before.oom_kills()) {
      hits.push_back({"memory", now.oom_kills() - before.oom_kills()});
    }
    if (now.pids_denied() > before.pids_denied()) {
      hits.push_back({"pids", now.pids_denied() - before.pids_denied()});
    }
  }
  Result<void> Cleanup(const Subject& subject, MonoTime deadline) override {
    return tree_.Remove(subject.slot, deadline);
  }
  Result<std::vector<std::string>> Recover(const Owned& owned, MonoTime deadline) override {
    return tree_.Sweep(SlotKind::kSandbox, owned.slot, deadline);
  }

 private:
  CgroupTree& tree_;
};

class ScratchIsolator final : public Isolator {
 public:
  explicit ScratchIsolator(Scratch& scratch) : scratch_(scratch) {}
  std::string_view name() const override { return "scratch"; }
  std::vector<v1::Capability> Capabilities() const override { return {scratch_.capability()}; }

  void Restrict(model::LimitsPolicy& policy) const override {
    policy.inode_cost_bytes = scratch_.inode_cost_bytes();
    struct statvfs space;
    if (::statvfs(scratch_.space_path().c_str(), &space) == 0) {
      LowerMax(policy.disk_bytes, space.f_blocks * space.f_frsize);
    }
  }

  Result<void> Prepare(const Subject& subject, LaunchParts& parts) override {
    DSEC_TRY(parts.scratch, scratch_.Create(subject.scratch, subject.limits.disk_bytes(),
                                            subject.limits.disk_inodes(), parts.owner));
    return Ok();
  }
  Result<void> Update(const Subject& subject) override {
    return scratch_.SetLimits(subject.scratch, subject.limits.disk_bytes(),
                              subject.limits.disk_inodes());
  }
  Result<void> Usage(const Subject& subject, v1::Usage& usage) override {
    if (subject.scratch.empty()) return Ok();
    auto used = scratch_.Usage(subject.scratch);
    if (!used.ok())
      return used.error().code() == Code::kNotFound ? Ok() : Result<void>(std::move(used).error());
    usage.set_disk_bytes(used->bytes);
    usage.set_disk_inodes(used->inodes);
    return Ok();
  }
  void Watch(const v1::Limits& limits, const v1::Usage& before, const v1::Usage& now,
             std::vector<LimitHit>& hits) const override {
    const auto full = [&](const v1::Usage& usage) {
      // A write is refused when it would pass the limit, so the figure stays a write's size below
      // it.
      constexpr uint64_t kSlack = 256 << 10;
      return usage.disk_bytes() + kSlack >= limits.disk_bytes() ||
             (usage.disk_inodes() != 0 && usage.disk_inodes() >= limits.disk_inodes());
    };
    if (full(now) && !full(before)) hits.push_back({"disk", 1});
  }
  Result<void> Cleanup(const Subject& subject, MonoTime) override {
    return subject.scratch.empty() ? Ok() : scratch_.Remove(subject.scratch);
  }
  Result<std::vector<std::string>> Recover(const Owned& owned, MonoTime) override {
    std::vector<std::string> lines;
    DSEC_TRY(const auto found, scratch_.List());
    for (const std::string& name : found) {
      if (owned.scratch(name)) continue;
      DSEC_TRY_VOID(scratch_.Remove(name));
      lines.push_back(fmt::format("scratch {}: removed", name));
    }
    return lines;
  }

 private:
  Scratch& scratch_;
};

class IdsIsolator final : public Isolator {
 public:
  explicit IdsIsolator(const IdPlan& ids) : ids_(ids) {}
  std::string_view name() const override { return "ids"; }
  std::vector<v1::Capability> Capabilities() const override {
    v1::Capability item;
    item.set_name("user_namespaces");
    item.set_used(fmt::format("{} ids a sandbox from {}", IdPlan::kIdsPerSlot, ids_.id_base));
    item.set_ok(true);
    item.set_detail(
        fmt::format("at most {} sandboxes; agents from id {}", ids_.slots, ids_.agent_uid_base));
    return {item};
  }
  Result<void> Isolate(const Subject& subject, SlotParts& parts) override {
    parts.plan.agent_uid = ids_.AgentUid(subject.slot.index);
    parts.plan.id_base = ids_.IdBase(subject.slot.index);
    return Ok();
  }
  Result<void> Prepare(const Subject& subject, LaunchParts& parts) override {
    parts.owner = ids_.IdBase(subject.slot.index);
    return Ok();
  }

 private:
  const IdPlan ids_;
};

class ViewsIsolator final : public Isolator {
 public:
  explicit ViewsIsolator(Views& views) : views_(views) {}
  std::string_view name() const override { return "views"; }
  Result<void> Prepare(const Subject& subject, LaunchParts& parts) override {
    DSEC_TRY(auto mounts, views_.For({subject.limits.cpu_millis(), subject.limits.memory_bytes()},
                                     parts.user_ns));
    for (ViewMount& view : mounts) {
      parts.plan.views.push_back({std::move(view.target)});
      parts.views.push_back(std::move(view.mount));
    }
    return Ok();
  }

 private:
  Views& views_;
};

class ProcessIsolator final : public Isolator {
 public:
  explicit ProcessIsolator(ProcessHost host) : host_(std::move(host)) {}
  std::string_view name() const override { return "process"; }

  void Restrict(model::LimitsPolicy& policy) const override {
    LowerMax(policy.open_files, host_.max_open_files);
    LowerMax(policy.pids, host_.max_pids);
    LowerMax(policy.cpu_millis, host_.cores.size() * 1000);
  }

  Result<void> Prepare(const Subject& subject, LaunchParts& parts) override {
    const v1::Limits& limits = subject.limits;
    parts.plan.rlimits = {
        {RLIMIT_NOFILE, limits.open_files(), limits.open_files()},
        // Not 0: that would still start a core_pattern pipe, whose handler runs on the host
        // (do_coredump in fs/coredump.c takes 1 for "never").
        {RLIMIT_CORE, 1, 1},
    };
    parts.plan.shm_size = Bytes(limits.shm_bytes());
    parts.plan.shm_inodes = std::max<uint64_t>(limits.shm_bytes() / 4096, 1024);
    const uint64_t visible = MilliCpu(limits.cpu_millis()).VisibleCores();
    const size_t all = host_.cores.size();
    // Everything: left to the scheduler.
    if (visible >= all) return Ok();
    for (uint64_t i = 0; i < visible; ++i) {
      parts.plan.cpus.push_back(host_.cores[(subject.slot.index + i) % all]);
    }
    return Ok();
  }

 private:
  const ProcessHost host_;
};

}  // namespace

Result<ProcessHost> ProcessHost::Read() {
  ProcessHost host;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0)
    return os::ErrnoError("process.affinity", "cores");
  for (uint32_t core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) host.cores.push_back(core);
  }
  rlimit files = {};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0)
    return os::ErrnoError("process.rlimit", "open files");
  host.max_open_files = files.rlim_max;
  DSEC_TRY(const auto text, os::ReadFile(AT_FDCWD, "/proc/sys/kernel/pid_max", 64));
  std::from_chars(text.data(), text.data() + text.size(), host.max_pids);
  return host;
}

std::unique_ptr<Isolator> MakeCgroupIsolator(CgroupTree& tree) {
  return std::make_unique<CgroupIsolator>(tree);
}
std::unique_ptr<Isolator> MakeScratchIsolator(Scratch& scratch) {
  return std::make_unique<ScratchIsolator>(scratch);
}
std::unique_ptr<Isolator> MakeIdsIsolator(const IdPlan& ids) {
  return std::make_unique<IdsIsolator>(ids);
}
std::unique_ptr<Isolator> MakeViewsIsolator(Views& views) {
  return std::make_unique<ViewsIsolator>(views);
}
std::unique_ptr<Isolator> MakeProcessIsolator(ProcessHost host) {
  return std::make_unique<ProcessIsolator>(std::move(host));
}

}  // namespace dsec::sandbox
