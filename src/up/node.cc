// SPDX-License-Identifier: Apache-2.0
#include "up/node.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/log.h"
#include "base/rng.h"
#include "fn/gpu.h"
#include "os/file.h"

namespace dsec::up {
namespace {

constexpr size_t kKeyBytes = 32;
constexpr unsigned kWorkersPerCore = 4;
constexpr unsigned kMinWorkers = 8;

// The path of a program beside this one.
Result<std::string> Beside(const std::string& given, const char* name) {
  if (!given.empty()) return given;
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return Error(Code::kInternal, "node.program", "/proc/self/exe: " + error.message());
  }
  return (self.parent_path() / name).string();
}

// Where the task types of the node are: as set, beside this program's folder, or in the source that
// it was built from.
Result<std::string> TypesDir(const config::NodeConfig& config) {
  if (!config.fn_types_dir.empty()) return config.fn_types_dir;
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return Error(Code::kInternal, "node.program", "/proc/self/exe: " + error.message());
  }
  const auto installed = self.parent_path().parent_path() / "share" / "dsec" / "fn_types";
  if (std::filesystem::is_directory(installed, error)) return installed.string();
  return std::string(DSEC_SHARE_DIR "/fn_types");
}

// Kernel and initramfs of microVMs: as set, beside this program's folder, or in the tree that it
// was built from.
Result<std::string> GuestDir(const config::NodeConfig& config) {
  if (!config.vm_guest_dir.empty()) return config.vm_guest_dir;
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return Error(Code::kInternal, "node.program", "/proc/self/exe: " + error.message());
  }
  const auto installed = self.parent_path().parent_path() / "share" / "dsec" / "guest";
  if (std::filesystem::is_directory(installed, error)) return installed.string();
  return std::string(DSEC_SHARE_DIR "/../build/guest");
}

std::string RandomHex(size_t bytes) {
  std::string out;
  std::array<uint8_t, kKeyBytes> random{};
  SecureRandom(random);
  for (size_t i = 0; i < bytes; ++i) out += fmt::format("{:02x}", random[i]);
  return out;
}

}  // namespace

Result<os::UniqueFd> LockState(const std::string& state_dir) {
  std::error_code error;
  std::filesystem::create_directories(state_dir, error);
  if (error) {
    return Error(Code::kInternal, "node.state_dir",
                 fmt::format("{}: {}", state_dir, error.message()));
  }
  if (chmod(state_dir.c_str(), 0700) != 0) return os::ErrnoError("node.state_dir", state_dir);
  const std::string path = state_dir + "/edge.lock";
  DSEC_TRY(os::UniqueFd lock, os::OpenAt(AT_FDCWD, path.c_str(), O_RDWR | O_CREAT, 0600));
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return os::ErrnoError("node.state_dir", path);
    return Error(
        Code::kConflict, "node.locked",
        fmt::format(
            "another dsec daemon holds the lock {}; a state folder belongs to one at a time",
            path));
  }
  return lock;
}

Result<std::string> LoadApiKey(const std::string& state_dir) {
  const std::string path = state_dir + "/api_key";
  auto file = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW);
  if (!file.ok() && file.error().sys_errno() == ENOENT) {
    // Whole or not at all: a crash between the steps leaves no half key.
    const std::string partial = path + ".new";
    unlink(partial.c_str());
    DSEC_TRY_VOID(os::CreateFile(AT_FDCWD, partial.c_str(), RandomHex(kKeyBytes) + "\n", 0600));
    if (rename(partial.c_str(), path.c_str()) != 0) return os::ErrnoError("node.api_key", path);
    file = os::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_NOFOLLOW);
  }
  if (!file.ok()) return std::move(file).error();
  struct stat info{};
  if (fstat(file->get(), &info) != 0) return os::ErrnoError("node.api_key", path);
  if ((info.st_mode & 0077) != 0) {
    return Error(Code::kFailedPrecondition, "node.api_key",
                 fmt::format("{} can be read by others (mode {:o}); it must be 0600", path,
                             info.st_mode & 07777));
  }
  DSEC_TRY(std::string key, os::ReadAll(file->get(), 4096));
  while (!key.empty() && (key.back() == '\n' || key.back() == ' ')) key.pop_back();
  if (key.size() < 16) {
    return Error(Code::kFailedPrecondition, "node.api_key",
                 fmt::format("{}: a key has at least 16 characters", path));
  }
  return key;
}

Result<sandbox::ContainerOptions> ContainerOptionsOf(const config::NodeConfig& config) {
  sandbox::ContainerOptions options;
  options.node_id = NodeId(config.node_id);
  options.state_dir = config.state_dir;
  options.run_dir = config.run_dir;
  DSEC_TRY(options.spawner_path, Beside(config.spawner_path, "dsec-spawner"));
  DSEC_TRY(options.agent_path, Beside(config.aether_path, "dsec-aether"));
  options.ids.id_base = static_cast<uint32_t>(config.id_base);
  options.ids.agent_uid_base = static_cast<uint32_t>(config.agent_uid_base);
  options.ids.slots = static_cast<uint32_t>(config.capacity + config.slot_pool_size);
  options.slot_pool_size = static_cast<uint32_t>(config.slot_pool_size);
  options.scratch_bytes = config.scratch_bytes;
  options.create_threads = std::clamp<size_t>(config.creates_at_once, 1, 16);
  auto& limits = options.limits;
  limits.memory_bytes.fallback = config.default_memory_bytes;
  limits.memory_bytes.max = config.max_memory_bytes;
  limits.cpu_millis.fallback = config.default_cpu_millis;
  limits.pids.fallback = config.default_pids;
  limits.disk_bytes.fallback = config.default_disk_bytes;
  limits.disk_bytes.max = config.max_disk_bytes;
  limits.disk_inodes.fallback = config.default_disk_inodes;
  limits.shm_bytes.fallback = config.default_shm_bytes;
  limits.open_files.fallback = config.default_open_files;
  limits.output_bytes.fallback = config.default_output_bytes;
  limits.output_bytes.max = config.max_output_bytes;
  limits.ttl_ms.fallback = config.default_ttl_ms;
  limits.idle_ms.fallback = config.default_idle_ms;
  return options;
}

Result<sandbox::MicroVmOptions> MicroVmOptionsOf(const config::NodeConfig& config) {
  sandbox::MicroVmOptions options;
  DSEC_TRY(const sandbox::ContainerOptions container, ContainerOptionsOf(config));
  options.node_id = container.node_id;
  options.state_dir = container.state_dir;
  options.run_dir = container.run_dir;
  options.limits = container.limits;
  DSEC_TRY(options.keeper_path, Beside(config.vm_keeper_path, "dsec-vmkeeper"));
  options.qemu_path = config.vm_qemu_path;
  DSEC_TRY(options.guest_dir, GuestDir(config));
  options.allow_emulation = config.vm_allow_emulation;
  options.max_vms = static_cast<uint32_t>(config.vm_max);
  return options;
}

edge::EdgeOptions EdgeOptionsOf(const config::NodeConfig& config, const std::string& scratch_path) {
  using std::chrono::milliseconds;
  edge::EdgeOptions options;
  options.node_id = NodeId(config.node_id);
  options.version = DSEC_VERSION;
  options.state_dir = config.state_dir;
  options.disk_paths = {config.state_dir, scratch_path};
  options.admission.max_sandboxes = config.capacity;
  options.admission.memory_reserve_bytes = config.memory_reserve_bytes;
  options.admission.disk_reserve_bytes = config.disk_reserve_bytes;
  options.admission.psi_memory_max = static_cast<double>(config.psi_memory_max_percent);
  options.admission.psi_cpu_max = static_cast<double>(config.psi_cpu_max_percent);
  options.admission.creates_at_once = static_cast<uint32_t>(config.creates_at_once);
  options.admission.max_waiting = static_cast<uint32_t>(config.create_queue);
  options.retention.ended_records = config.ended_records;
  options.retention.ended_age_ms = static_cast<int64_t>(config.ended_age_ms);
  options.retention.events = config.events_kept;
  options.claim_grace = milliseconds(config.claim_grace_ms);
  options.disconnect_grace = milliseconds(config.disconnect_grace_ms);
  options.reconcile_period = milliseconds(config.reconcile_period_ms);
  return options;
}

sandbox::FnCallOptions FnCallOptionsOf(const config::NodeConfig& config) {
  sandbox::FnCallOptions options;
  auto& limits = options.limits;
  limits.wall_ms.fallback = config.fn_default_wall_ms;
  limits.wall_ms.max = config.fn_max_wall_ms;
  limits.cpu_ms.fallback = config.fn_default_cpu_ms;
  limits.cpu_ms.max = config.fn_max_wall_ms;
  limits.memory_bytes.fallback = config.fn_default_memory_bytes;
  limits.memory_bytes.max = config.fn_max_memory_bytes;
  limits.processes.fallback = config.fn_default_processes;
  limits.output_bytes.fallback = config.fn_default_output_bytes;
  limits.output_bytes.max = config.fn_max_output_bytes;
  limits.file_bytes.fallback = config.fn_default_file_bytes;
  limits.disk_bytes.fallback = config.fn_default_disk_bytes;
  return options;
}

Result<fn::FnOptions> FnOptionsOf(const config::NodeConfig& config) {
  using std::chrono::milliseconds;
  fn::FnOptions options;
  options.state_dir = config.state_dir;
  DSEC_TRY(std::string types_dir, TypesDir(config));
  options.types_dirs = {std::move(types_dir)};
  options.pools.workers_max = static_cast<uint32_t>(
      config.fn_workers_max != 0
          ? config.fn_workers_max
          : std::max(kMinWorkers, kWorkersPerCore * std::thread::hardware_concurrency()));
  options.pools.makes_at_once = static_cast<uint32_t>(config.fn_makes_at_once);
  options.pools.queue_max = static_cast<uint32_t>(config.fn_queue_max);
  options.queue_bytes = config.fn_queue_bytes;
  options.pools.idle = milliseconds(config.fn_idle_ms);
  options.attempts = static_cast<uint32_t>(config.fn_attempts);
  options.ops.count = config.fn_ops_kept;
  options.ops.bytes = config.fn_ops_kept_bytes;
  options.ops.age = milliseconds(config.fn_ops_kept_ms);
  options.compile_cache_entries = config.fn_compile_cache;
  options.artifacts.bytes = config.fn_artifact_bytes;
  options.artifacts.item_bytes = config.fn_artifact_max_bytes;
  options.fetch_bytes = config.fn_fetch_bytes;
  DSEC_TRY(options.mig_profiles, fn::ParseMigProfiles(config.fn_mig_profiles));
  options.gpu_shared_max = static_cast<uint32_t>(config.fn_gpu_shared_max);
  return options;
}

std::string LayersDir(const config::NodeConfig& config) {
  return config.layers_dir.empty() ? config.state_dir + "/layers" : config.layers_dir;
}

image::LayerMountOptions LayerMountOptionsOf(const config::NodeConfig& config) {
  image::LayerMountOptions options;
  options.cache_dir = config.layers_cache_dir.empty() ? config.state_dir + "/layers_cache"
                                                      : config.layers_cache_dir;
  options.cache_bytes = config.layers_cache_bytes;
  options.node = config.node_id;
  options.patience = std::chrono::milliseconds(config.layers_patience_ms);
  options.prefetch.requests = config.layers_prefetch;
  options.prefetch.bytes_per_s = config.layers_prefetch_bytes_per_s;
  return options;
}

std::string BlobfsDir(const config::NodeConfig& config) { return config.state_dir + "/blobfs"; }

bool WantsBlobfs(const config::NodeConfig& config) {
  return config.layers_verify || !config.layers_url.empty();
}

Result<blobfs::ClientOptions> BlobfsOptionsOf(const config::NodeConfig& config) {
  blobfs::ClientOptions options;
  blobfs::Settings& settings = options.settings;
  settings.dir = BlobfsDir(config);
  settings.root = LayersDir(config);
  settings.url = config.layers_url;
  settings.headers_file = config.layers_url_headers_file;
  settings.ca_file = config.layers_url_ca_file;
  settings.cache_dir = config.layers_data_cache_dir.empty() ? config.state_dir + "/layers_data"
                                                            : config.layers_data_cache_dir;
  settings.cache_bytes = config.layers_data_cache_bytes;
  settings.log = LogOptionsOf(config);
  options.run_dir = config.run_dir;
  DSEC_TRY(options.program, Beside(config.blobfs_path, "dsec-blobfs"));
  return options;
}

log::Options LogOptionsOf(const config::NodeConfig& config) {
  log::Options options;
  options.format = config.log_format == "json" ? log::Format::kJson : log::Format::kText;
  if (config.log_level == "debug") options.level = log::Level::kDebug;
  if (config.log_level == "warn") options.level = log::Level::kWarn;
  if (config.log_level == "error") options.level = log::Level::kError;
  return options;
}

size_t ShardCount(const config::NodeConfig& config) {
  if (config.shards != 0) return config.shards;
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 8);
}

Result<void> RaiseOpenFiles() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return os::ErrnoError("node.rlimit", "RLIMIT_NOFILE");
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) return os::ErrnoError("node.rlimit", "RLIMIT_NOFILE");
  return {};
}

void NotifyReady() {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string_view name(path);
  if (name.size() >= sizeof address.sun_path) return;
  name.copy(address.sun_path, name.size());
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  const os::UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  constexpr std::string_view kReady = "READY=1";
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  if (sendto(socket.get(), kReady.data(), kReady.size(), MSG_NOSIGNAL,
             reinterpret_cast<const sockaddr*>(&address), length) < 0) {
    log::Warn("node.notify_failed", {{"errno", errno}});
  }
}

}  // namespace dsec::up
