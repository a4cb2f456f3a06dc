// SPDX-License-Identifier: Apache-2.0
#include "image/erofs.h"

#include <endian.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "image/layer.h"
#include "os/file.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"

namespace dsec::image {
namespace {

// Bytes read from real trees do not depend on it between 4 KiB and 4 MiB; smaller chunks find more
// duplicates and need a larger map. At 64 KiB the map is 0.01 % of the data (see format_spec.md).
constexpr char kChunkOption[] = "--chunksize=65536";
// mkfs.erofs keeps mtimes that lie before this time and writes it into the superblock. As it
// compares unsigned, -2 lies after every other time, years before 1970 included; -1 is refused.
constexpr char kEpoch[] = "SOURCE_DATE_EPOCH=18446744073709551614";
constexpr size_t kMaxOutput = 64 << 10;
constexpr auto kPoll = std::chrono::milliseconds(100);

class SpawnActions {
 public:
  SpawnActions() { ::posix_spawn_file_actions_init(&actions_); }
  ~SpawnActions() { ::posix_spawn_file_actions_destroy(&actions_); }
  SpawnActions(const SpawnActions&) = delete;
  SpawnActions& operator=(const SpawnActions&) = delete;
  posix_spawn_file_actions_t* get() { return &actions_; }

 private:
  posix_spawn_file_actions_t actions_;
};

uint64_t SizeAt(int dirfd, const char* path) {
  struct stat status;
  return ::fstatat(dirfd, path, &status, 0) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
}

// Last words of the child, for the error.
std::string OutputOf(int fd) {
  std::string text(kMaxOutput, '\0');
  const ssize_t n = ::pread(fd, text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return Printable(text);
}

Result<siginfo_t> Reap(pid_t pid) {
  siginfo_t info = {};
  while (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED) != 0) {
    if (errno != EINTR) return os::ErrnoError("layer.build_failed", "wait for mkfs.erofs");
  }
  return info;
}

}  // namespace

Result<void> WriteErofs(int work, int lock_fd, const std::function<bool(uint64_t)>& progress) {
  const os::UniqueFd output(::memfd_create("mkfs.erofs", MFD_CLOEXEC));
  if (!output.valid()) return os::ErrnoError("layer.build_failed", "memfd_create");

  SpawnActions actions;
  int failed = ::posix_spawn_file_actions_addopen(actions.get(), 0, "/dev/null", O_RDONLY, 0);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), output.get(), 1);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), output.get(), 2);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), lock_fd, 3);
  failed |= ::posix_spawn_file_actions_addfchdir_np(actions.get(), work);
  if (failed != 0) return Error(Code::kInternal, "layer.build_failed", "no memory");

  const std::string blob = std::string("--blobdev=out/") + kBlobName;
  const std::string meta = std::string("out/") + kMetaName;
  const std::array<const char*, 10> argv = {"mkfs.erofs",
                                            "--quiet",
                                            "--preserve-mtime",
                                            "-Uc1b9d5a2-0000-4000-8000-64736563206c",
                                            "-Enoinline_data,force-chunk-indexes",
                                            kChunkOption,
                                            blob.c_str(),
                                            meta.c_str(),
                                            "tree",
                                            nullptr};
  const std::array<const char*, 4> envp = {"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", kEpoch,
                                           nullptr};
  pid_t pid = -1;
  failed = ::posix_spawnp(&pid, argv[0], actions.get(), nullptr, const_cast<char**>(argv.data()),
                          const_cast<char**>(envp.data()));
  if (failed == ENOENT) {
    return Error(Code::kFailedPrecondition, "layer.no_mkfs",
                 "mkfs.erofs is not installed (Debian: erofs-utils)");
  }
  if (failed != 0) return Error::FromErrno(failed, "layer.build_failed", "start mkfs.erofs");

  const os::UniqueFd pidfd(os::PidFdOpen(pid, 0));
  bool cancelled = false;
  while (pidfd.valid()) {
    auto ended = os::WaitReadable(pidfd.get(), Clock::System().Mono() + kPoll);
    if (!ended.ok() || *ended) break;
    if (progress && !progress(SizeAt(work, (std::string("out/") + kBlobName).c_str()))) {
      cancelled = true;
      ::kill(pid, SIGKILL);  // not reaped yet: the number is still the child's
      break;
    }
  }
  DSEC_TRY(const siginfo_t info, Reap(pid));
  const bool good = info.si_code == CLD_EXITED && info.si_status == 0;
  // A Ctrl-C at a terminal reaches the child, too, and may end it first.
  if (!good && !cancelled && progress) cancelled = !progress(0);
  if (cancelled) {
    return Error(Code::kCancelled, "layer.cancelled", "cancelled while writing the image");
  }
  if (good) return Ok();
  const std::string said = OutputOf(output.get());
  // What it says for ENOSPC is strerror's sentence.
  if (said.find(::strerrordesc_np(ENOSPC)) != std::string::npos) {
    return Error(Code::kResourceExhausted, "layer.no_space", "mkfs.erofs: " + said);
  }
  return Error(Code::kInternal, "layer.build_failed",
               fmt::format("mkfs.erofs ended by {} {}: {}",
                           info.si_code == CLD_EXITED ? "code" : "signal", info.si_status, said));
}

Result<void> CheckSuperblock(int meta_fd) {
  // Byte offsets inside the superblock, fs/erofs/erofs_fs.h struct erofs_super_block.
  constexpr off_t kSuperOffset = 1024;
  constexpr uint32_t kMagic = 0xE0F5E1E2;
  constexpr size_t kBlockBits = 12;
  constexpr size_t kIncompat = 80;
  constexpr size_t kExtraDevices = 86;
  constexpr uint32_t kChunkedFile = 0x4;
  constexpr uint32_t kDeviceTable = 0x8;
  std::array<uint8_t, 128> super = {};
  if (::pread(meta_fd, super.data(), super.size(), kSuperOffset) !=
      static_cast<ssize_t>(super.size())) {
    return Error(Code::kInternal, "layer.corrupt", "meta.erofs has no superblock");
  }
  const auto u32 = [&](size_t at) {
    uint32_t value;
    std::memcpy(&value, super.data() + at, sizeof(value));
    return le32toh(value);
  };
  uint16_t devices;
  std::memcpy(&devices, super.data() + kExtraDevices, sizeof(devices));
  devices = le16toh(devices);
  if (u32(0) != kMagic || super[kBlockBits] != 12 || devices != 1 ||
      (u32(kIncompat) & ~(kChunkedFile | kDeviceTable)) != 0 ||
      (u32(kIncompat) & kDeviceTable) == 0) {
    return Error(Code::kInternal, "layer.corrupt",
                 fmt::format("meta.erofs: magic {:x}, block bits {}, {} devices, features {:x}",
                             u32(0), super[kBlockBits], devices, u32(kIncompat)));
  }
  return Ok();
}

}  // namespace dsec::image
