// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "guest/boot.h"
#include "os/file.h"
#include "os/memfd.h"
#include "os/mount.h"
#include "sandbox/isolators/standard.h"
#include "spawn/spawner.h"

namespace dsec::guest {
namespace {

using os::UniqueFd;

constexpr auto kStepTime = std::chrono::seconds(60);  // emulated machines are slow
constexpr char kSocketPath[] = "/run/agent.sock";
constexpr uint64_t kLayerFlags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID;

const sandbox::SlotName kSlot{0, 1};

Result<UniqueFd> MountLayer(uint32_t index) {
  DSEC_TRY(const std::string meta, FindDisk(fmt::format("m{}", index)));
  // Content that several layers of the store have comes as disks of its own, in order.
  std::vector<std::string> blobs;
  while (true) {
    auto blob = FindDisk(vmm::ContentSerial(index, blobs.size()));
    if (!blob.ok() && (blobs.empty() || blob.error().code() != Code::kNotFound))
      return std::move(blob).error();
    if (!blob.ok()) break;
    blobs.push_back(*std::move(blob));
  }
  DSEC_TRY(auto erofs, os::FsContext::Open("erofs"));
  DSEC_TRY_VOID(erofs.SetString("source", meta.c_str()));
  for (const std::string& blob : blobs) DSEC_TRY_VOID(erofs.SetString("device", blob.c_str()));
  DSEC_TRY_VOID(erofs.SetFlag("ro"));
  return std::move(erofs).Mount(kLayerFlags).Context("layer {}", index);
}

Result<UniqueFd> MountDisk() {
  DSEC_TRY(const std::string disk, FindDisk(vmm::kDiskSerial));
  DSEC_TRY(auto ext4, os::FsContext::Open("ext4"));
  DSEC_TRY_VOID(ext4.SetString("source", disk.c_str()));
  DSEC_TRY_VOID(ext4.SetFlag("discard"));
  return std::move(ext4).Mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOATIME);
}

Result<void> MakeOwned(const std::string& path, uint32_t owner) {
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, path.c_str(), 0755));
  if (::chown(path.c_str(), owner, owner) != 0) return os::ErrnoError("guest.chown", path);
  return Ok();
}

// The overlay by path: by descriptor it takes Linux 6.13, which the guest's kernel is not.
Result<UniqueFd> BuildRoot(const vmm::BootConfig& config, uint32_t owner, int user_ns) {
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, "/layers", 0700));
  for (uint32_t i = 0; i < config.layers; ++i) {
    const std::string path = fmt::format("/layers/{}", i);
    DSEC_TRY(const auto layer, MountLayer(i));
    DSEC_TRY_VOID(os::SetMountAttributes(layer.get(), kLayerFlags, 0, user_ns));
    DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, path.c_str(), 0700));
    DSEC_TRY_VOID(os::MoveMount(layer.get(), AT_FDCWD, path.c_str()));
  }
  DSEC_TRY(const auto disk, MountDisk());
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, "/disk", 0700));
  DSEC_TRY_VOID(os::MoveMount(disk.get(), AT_FDCWD, "/disk"));
  DSEC_TRY_VOID(MakeOwned("/disk/upper", owner));
  DSEC_TRY_VOID(MakeOwned("/disk/work", owner));
  DSEC_TRY(auto overlay, os::FsContext::Open("overlay"));
  DSEC_TRY_VOID(overlay.SetString("source", "overlay"));
  for (uint32_t i = config.layers; i-- > 0;)
    DSEC_TRY_VOID(overlay.SetString("lowerdir+", fmt::format("/layers/{}", i).c_str()));
  DSEC_TRY_VOID(overlay.SetString("upperdir", "/disk/upper"));
  DSEC_TRY_VOID(overlay.SetString("workdir", "/disk/work"));
  // As in sandbox/rootfs.cc.
  DSEC_TRY_VOID(overlay.SetString("redirect_dir", "nofollow"));
  DSEC_TRY_VOID(overlay.SetString("metacopy", "off"));
  DSEC_TRY_VOID(overlay.SetString("index", "off"));
  DSEC_TRY_VOID(overlay.SetString("xino", "auto"));
  DSEC_TRY_VOID(overlay.SetString("uuid", "null"));
  DSEC_TRY_VOID(overlay.SetFlag("volatile"));
  return std::move(overlay).Mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOATIME);
}

Result<UniqueFd> Listen() {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, kSocketPath, sizeof(kSocketPath));
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid() ||
      ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(socket.get(), 4) != 0) {
    return os::ErrnoError("guest.listen", kSocketPath);
  }
  return socket;
}

v1::Limits LimitsOf(const vmm::BootConfig& config) {
  v1::Limits limits;
  limits.set_memory_bytes(config.memory_bytes);
  limits.set_cpu_millis(config.cpu_millis);
  limits.set_pids(config.pids);
  limits.set_shm_bytes(config.shm_bytes);
  limits.set_open_files(config.open_files);
  return limits;
}

}  // namespace

bool Standing::OomKilled() const {
  v1::Usage usage;
  return tree->ReadUsage(kSlot, usage).ok() && usage.oom_kills() > 0;
}

Result<Standing> Launch(const vmm::BootConfig& config) {
  Standing standing;
  standing.socket_path = kSocketPath;
  sandbox::IdPlan ids;
  ids.slots = 1;
  DSEC_TRY(standing.tree, sandbox::CgroupTree::Open({"dsec", "", nullptr}));
  DSEC_TRY_VOID(os::MakeDir(AT_FDCWD, "/views", 0700));
  DSEC_TRY(const auto views, sandbox::Views::Open("", "/views"));
  // The kernel begins with 4096, and what is started inside can only lower what we have.
  const rlimit files = {config.open_files, config.open_files};
  if (::setrlimit(RLIMIT_NOFILE, &files) != 0) return os::ErrnoError("guest.rlimit", "open files");
  DSEC_TRY(auto process, sandbox::ProcessHost::Read());
  sandbox::Isolators isolators;
  isolators.push_back(sandbox::MakeIdsIsolator(ids));
  isolators.push_back(sandbox::MakeCgroupIsolator(*standing.tree));
  isolators.push_back(sandbox::MakeViewsIsolator(*views));
  isolators.push_back(sandbox::MakeProcessIsolator(std::move(process)));
  const sandbox::Subject subject{kSlot, "", LimitsOf(config)};

  DSEC_TRY(const auto spawner,
           spawn::Spawner::Start({"/bin/dsec-spawner", "/bin/dsec-aether", STDERR_FILENO}));
  Say("spawner");
  sandbox::SlotParts slot_parts;
  for (const auto& isolator : isolators)
    DSEC_TRY_VOID(isolator->Isolate(subject, slot_parts).Context("isolate {}", isolator->name()));
  DSEC_TRY(const auto listener, Listen());
  DSEC_TRY(const auto token,
           os::SealedMemfd("dsec-token", {reinterpret_cast<const uint8_t*>(config.token.data()),
                                          config.token.size()}));
  slot_parts.plan.listen_fd = listener.get();
  slot_parts.plan.token_fd = token.get();
  DSEC_TRY(auto slot, spawner->MakeSlot(slot_parts.plan, runtime::Deadline::After(kStepTime)));
  Say("slot");

  sandbox::LaunchParts parts;
  parts.user_ns = slot.user_ns.get();
  parts.plan.hostname = config.hostname;
  parts.plan.hosts = fmt::format(
      "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{}\n",
      config.hostname);
  parts.plan.resolv_conf = "# network: none\n";
  for (const auto& isolator : isolators)
    DSEC_TRY_VOID(isolator->Prepare(subject, parts).Context("prepare {}", isolator->name()));
  DSEC_TRY(const auto root, BuildRoot(config, parts.owner, parts.user_ns));
  Say("root");
  std::vector<int> fds = {root.get()};
  for (const UniqueFd& view : parts.views) fds.push_back(view.get());
  DSEC_TRY_VOID(spawn::Launch(slot.launch_socket.get(), parts.plan, fds,
                              runtime::Deadline::After(kStepTime)));
  standing.agent = std::move(slot.agent);
  return standing;
}

}  // namespace dsec::guest
