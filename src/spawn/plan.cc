// SPDX-License-Identifier: Apache-2.0
#include "spawn/plan.h"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>

namespace dsec::spawn {
namespace {

Error Bad(const char* field, std::string message) {
  return Error(Code::kInvalidArgument, "spawn.bad_plan", fmt::format("{}: {}", field, message))
      .WithField(field);
}

Result<void> CheckFd(const char* field, int fd) {
  if (fd < 0 || ::fcntl(fd, F_GETFD) < 0)
    return Bad(field, fmt::format("{} is not an open descriptor", fd));
  return Ok();
}

Result<void> CheckIds(uint32_t agent_uid, uint32_t id_base) {
  // The kernel's overflow id and the id that setresuid takes for "keep" are not for use.
  constexpr uint32_t kOverflowId = 65534;
  constexpr uint32_t kLastId = 0xfffffffe;
  if (agent_uid == 0 || agent_uid == kOverflowId || agent_uid > kLastId) {
    return Bad("agent_uid", fmt::format("{} is root, nobody or no id", agent_uid));
  }
  if (id_base < wire::kIdCount || id_base > kLastId - wire::kIdCount) {
    return Bad("id_base", fmt::format("{} is not between {} and {}", id_base, wire::kIdCount,
                                      kLastId - wire::kIdCount));
  }
  if (agent_uid >= id_base && agent_uid - id_base < wire::kIdCount) {
    return Bad("agent_uid",
               fmt::format("{} lies in the sandbox's own ids from {} on", agent_uid, id_base));
  }
  return Ok();
}

Result<void> CheckV1(const std::vector<int>& fds) {
  if (fds.size() > wire::kMaxV1) {
    return Bad("v1_procs_fds", fmt::format("{} hierarchies, at most {}", fds.size(), wire::kMaxV1));
  }
  for (int fd : fds) DSEC_TRY_VOID(CheckFd("v1_procs_fds", fd));
  return Ok();
}

bool IsHostname(const std::string& name) {
  auto ok = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '.';
  };
  return !name.empty() && name.size() <= wire::kMaxHostname && std::ranges::all_of(name, ok);
}

bool IsViewTarget(const std::string& target) {
  if (target == "/sys") return true;
  if (!target.starts_with("/proc/") || target.size() >= wire::kMaxTarget || target.ends_with('/'))
    return false;
  return target.find("//") == std::string::npos && target.find("/.") == std::string::npos &&
         target.find('\0') == std::string::npos;
}

void Copy(char* to, const std::string& text) { std::memcpy(to, text.data(), text.size()); }

}  // namespace

Result<void> CheckViewTarget(const std::string& target) {
  if (IsViewTarget(target)) return Ok();
  return Bad("views",
             fmt::format("'{}' is neither /sys nor a plain path below /proc of less than {} bytes",
                         target, wire::kMaxTarget));
}

Result<void> SlotPlan::Validate() const {
  DSEC_TRY_VOID(CheckIds(agent_uid, id_base));
  DSEC_TRY_VOID(CheckFd("listen_fd", listen_fd));
  DSEC_TRY_VOID(CheckFd("token_fd", token_fd));
  DSEC_TRY_VOID(CheckFd("slot_dir_fd", slot_dir_fd));
  DSEC_TRY_VOID(CheckFd("agent_dir_fd", agent_dir_fd));
  DSEC_TRY_VOID(CheckFd("init_dir_fd", init_dir_fd));
  if (memory_dir_fd >= 0) DSEC_TRY_VOID(CheckFd("memory_dir_fd", memory_dir_fd));
  if (pids_dir_fd >= 0) DSEC_TRY_VOID(CheckFd("pids_dir_fd", pids_dir_fd));
  if (cpu_dir_fd >= 0) DSEC_TRY_VOID(CheckFd("cpu_dir_fd", cpu_dir_fd));
  return CheckV1(v1_procs_fds);
}

wire::Slot SlotPlan::Encode(std::vector<int>& fds, uint32_t timeout_ms) const {
  wire::Slot slot;
  slot.agent_uid = agent_uid;
  slot.id_base = id_base;
  slot.has_memory = memory_dir_fd >= 0 ? 1 : 0;
  slot.has_pids = pids_dir_fd >= 0 ? 1 : 0;
  slot.has_cpu = cpu_dir_fd >= 0 ? 1 : 0;
  slot.v1_count = static_cast<uint32_t>(v1_procs_fds.size());
  slot.timeout_ms = timeout_ms;
  fds = {listen_fd, token_fd, slot_dir_fd, agent_dir_fd, init_dir_fd};
  if (memory_dir_fd >= 0) fds.push_back(memory_dir_fd);
  if (pids_dir_fd >= 0) fds.push_back(pids_dir_fd);
  if (cpu_dir_fd >= 0) fds.push_back(cpu_dir_fd);
  fds.insert(fds.end(), v1_procs_fds.begin(), v1_procs_fds.end());
  return slot;
}

Result<void> WorkerPlan::Validate() const {
  DSEC_TRY_VOID(CheckIds(agent_uid, id_base));
  DSEC_TRY_VOID(CheckFd("slot_dir_fd", slot_dir_fd));
  DSEC_TRY_VOID(CheckFd("agent_dir_fd", agent_dir_fd));
  DSEC_TRY_VOID(CheckFd("init_dir_fd", init_dir_fd));
  return CheckV1(v1_procs_fds);
}

wire::Worker WorkerPlan::Encode(std::vector<int>& fds, uint32_t timeout_ms) const {
  wire::Worker worker;
  worker.agent_uid = agent_uid;
  worker.id_base = id_base;
  worker.v1_count = static_cast<uint32_t>(v1_procs_fds.size());
  worker.timeout_ms = timeout_ms;
  fds = {slot_dir_fd, agent_dir_fd, init_dir_fd};
  fds.insert(fds.end(), v1_procs_fds.begin(), v1_procs_fds.end());
  return worker;
}

Result<void> LaunchPlan::Validate() const {
  if (!IsHostname(hostname)) {
    return Bad("hostname", fmt::format("'{}' is not 1 to {} of letters, digits, '-' and '.'",
                                       hostname, wire::kMaxHostname));
  }
  if (hosts.size() > wire::kMaxHosts) {
    return Bad("hosts", fmt::format("{} bytes, at most {}", hosts.size(), wire::kMaxHosts));
  }
  if (resolv_conf.size() > wire::kMaxResolvConf) {
    return Bad("resolv_conf",
               fmt::format("{} bytes, at most {}", resolv_conf.size(), wire::kMaxResolvConf));
  }
  // tmpfs takes 0 for "no limit".
  if (shm_size.count() < 4096)
    return Bad("shm_size", fmt::format("{} bytes, at least 4096", shm_size.count()));
  if (shm_inodes < 2) return Bad("shm_inodes", fmt::format("{}, at least 2", shm_inodes));
  if (views.size() > wire::kMaxViews)
    return Bad("views", fmt::format("{}, at most {}", views.size(), wire::kMaxViews));
  for (size_t i = 0; i < views.size(); ++i) {
    const std::string& target = views[i].target;
    DSEC_TRY_VOID(CheckViewTarget(target));
    for (size_t j = 0; j < i; ++j) {
      if (views[j] == views[i]) return Bad("views", fmt::format("'{}' appears twice", target));
    }
  }
  if (rlimits.size() > wire::kMaxRlimits) {
    return Bad("rlimits", fmt::format("{}, at most {}", rlimits.size(), wire::kMaxRlimits));
  }
  for (const Rlimit& limit : rlimits) {
    if (limit.resource < 0 || limit.resource >= RLIM_NLIMITS) {
      return Bad("rlimits", fmt::format("{} is not a resource", limit.resource));
    }
    if (limit.soft > limit.hard) {
      return Bad("rlimits", fmt::format("resource {}: soft limit {} above hard limit {}",
                                        limit.resource, limit.soft, limit.hard));
    }
    // init itself lives under them.
    constexpr uint64_t kMinFiles = 256;
    if (limit.resource == RLIMIT_NOFILE && limit.soft < kMinFiles) {
      return Bad("rlimits", fmt::format("RLIMIT_NOFILE {}, at least {}", limit.soft, kMinFiles));
    }
    if (limit.resource == RLIMIT_CPU || limit.resource == RLIMIT_AS ||
        limit.resource == RLIMIT_DATA || limit.resource == RLIMIT_FSIZE) {
      return Bad("rlimits", fmt::format("resource {} belongs to single execs: it would end init",
                                        limit.resource));
    }
  }
  for (uint32_t cpu : cpus) {
    if (cpu >= wire::kCpuMaskWords * 64) {
      return Bad("cpus", fmt::format("core {}, below {}", cpu, wire::kCpuMaskWords * 64));
    }
  }
  if ((extra_capabilities_ & ~(kGrantableCapabilities | kCodeCapabilities)) != 0) {
    return Bad("capabilities",
               fmt::format("mask {:#x} holds capabilities that cannot be granted; grantable: {:#x}",
                           extra_capabilities_, kGrantableCapabilities));
  }
  return Ok();
}

wire::Launch LaunchPlan::Encode() const {
  wire::Launch launch;
  launch.view_count = static_cast<uint32_t>(views.size());
  launch.rlimit_count = static_cast<uint32_t>(rlimits.size());
  launch.capabilities = capabilities();
  launch.shm_bytes = shm_size.count();
  launch.shm_inodes = shm_inodes;
  for (uint32_t cpu : cpus) launch.cpu_mask[cpu / 64] |= 1ull << (cpu % 64);
  for (size_t i = 0; i < rlimits.size(); ++i) {
    launch.rlimits[i] = {static_cast<uint32_t>(rlimits[i].resource), 0, rlimits[i].soft,
                         rlimits[i].hard};
  }
  for (size_t i = 0; i < views.size(); ++i) Copy(launch.views[i], views[i].target);
  Copy(launch.hostname, hostname);
  launch.hosts_bytes = static_cast<uint32_t>(hosts.size());
  launch.resolv_conf_bytes = static_cast<uint32_t>(resolv_conf.size());
  Copy(launch.hosts, hosts);
  Copy(launch.resolv_conf, resolv_conf);
  return launch;
}

}  // namespace dsec::spawn
