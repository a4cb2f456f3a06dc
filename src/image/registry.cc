// SPDX-License-Identifier: Apache-2.0
#include "image/registry.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "image/digest.h"
#include "image/fs.h"
#include "image/layer.h"
#include "os/file.h"
#include "os/syscalls.h"
#include "os/unique_fd.h"

namespace dsec::image {
namespace {

constexpr char kBlobFolder[] = "sha256";
constexpr size_t kMaxOutput = 64 << 10;
constexpr size_t kMaxRef = 1024;
constexpr auto kPoll = std::chrono::milliseconds(200);
constexpr std::chrono::days kUnusedAge{7};

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

// Bytes in the files of a folder; what cannot be read counts for nothing, it is for progress alone.
uint64_t BytesIn(int dirfd, const std::string& path) {
  const auto dir = os::OpenAt(dirfd, path.c_str(), O_RDONLY | O_DIRECTORY);
  if (!dir.ok()) return 0;
  const auto names = ListNames(dir->get(), UINT64_MAX);
  if (!names.ok()) return 0;
  uint64_t total = 0;
  for (const std::string& name : *names) {
    struct stat status;
    if (::fstatat(dir->get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
        S_ISREG(status.st_mode)) {
      total += static_cast<uint64_t>(status.st_size);
    }
  }
  return total;
}

// The last words of the child, for the error.
std::string OutputOf(int fd) {
  std::string text(kMaxOutput, '\0');
  const ssize_t n = ::pread(fd, text.data(), text.size(), 0);
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  const size_t line = text.rfind('\n');
  return Printable(line == std::string::npos ? text : text.substr(line + 1));
}

Result<pid_t> Spawn(const FetchRequest& request, int output) {
  SpawnActions actions;
  int failed = ::posix_spawn_file_actions_addopen(actions.get(), 0, "/dev/null", O_RDONLY, 0);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), output, 1);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), output, 2);
  failed |= ::posix_spawn_file_actions_adddup2(actions.get(), request.work, 3);
  failed |= ::posix_spawn_file_actions_addfchdir_np(actions.get(), request.work);
  if (failed != 0) return Error(Code::kInternal, "layer.registry", "no memory");
  std::vector<std::string> words = {"skopeo",
                                    "copy",
                                    "--quiet",
                                    "--retry-times=3",
                                    "--dest-oci-accept-uncompressed-layers",
                                    "--dest-shared-blob-dir=" + request.cache};
  if (request.plain_http) words.emplace_back("--src-tls-verify=false");
  words.push_back("docker://" + request.ref);
  words.push_back(std::string("oci:") + kFetchedLayout);
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  failed = ::posix_spawnp(&pid, argv[0], actions.get(), nullptr, argv.data(), ::environ);
  if (failed == ENOENT) {
    return Error(Code::kFailedPrecondition, "layer.no_skopeo",
                 "skopeo is not installed (Debian: skopeo)");
  }
  if (failed != 0) return Error::FromErrno(failed, "layer.registry", "start skopeo");
  return pid;
}

Result<siginfo_t> Reap(pid_t pid) {
  siginfo_t info = {};
  while (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED) != 0) {
    if (errno != EINTR) return os::ErrnoError("layer.registry", "wait for skopeo");
  }
  return info;
}

// Calls `drop(dirfd, name)` for each blob and removes those for which it is true.
template <typename Drop>
Result<void> DropBlobs(int cache, std::string_view why, const Drop& drop) {
  auto dir = os::OpenAt(cache, kBlobFolder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!dir.ok()) return dir.error().sys_errno() == ENOENT ? Ok() : std::move(dir).error();
  DSEC_TRY(const auto names, ListNames(dir->get(), UINT64_MAX));
  for (const std::string& name : names) {
    DSEC_TRY(const bool dropped, drop(dir->get(), name));
    if (!dropped) continue;
    log::Info("layer.cached_blob_dropped", {{"blob", name}, {"why", why}});
    if (::unlinkat(dir->get(), name.c_str(), 0) != 0 && errno != ENOENT) {
      return StoreError("remove a cached blob");
    }
  }
  return Ok();
}

}  // namespace

Result<void> FetchImage(const FetchRequest& request, const std::function<bool(uint64_t)>& proceed) {
  if (request.ref.empty() || request.ref.size() > kMaxRef ||
      !std::ranges::all_of(request.ref, [](char c) { return c > ' ' && c < 0x7f; })) {
    return Error(Code::kInvalidArgument, "layer.source",
                 fmt::format("\"{}\" is no reference of an image", Printable(request.ref)))
        .WithField("source");
  }
  const os::UniqueFd output(::memfd_create("skopeo", MFD_CLOEXEC));
  if (!output.valid()) return os::ErrnoError("layer.registry", "memfd_create");
  const std::string blobs = request.cache + "/" + kBlobFolder;
  const auto present = [&] {
    return BytesIn(request.work, blobs) + BytesIn(request.work, kFetchedLayout);
  };
  const uint64_t before = present();
  DSEC_TRY(const pid_t pid, Spawn(request, output.get()));
  const os::UniqueFd pidfd(os::PidFdOpen(pid, 0));
  bool cancelled = false;
  while (pidfd.valid()) {
    auto ended = os::WaitReadable(pidfd.get(), Clock::System().Mono() + kPoll);
    if (!ended.ok() || *ended) break;
    if (proceed && !proceed(std::max(present(), before) - before)) {
      cancelled = true;
      ::kill(pid, SIGKILL);  // not reaped yet: the number is still the child's
      break;
    }
  }
  DSEC_TRY(const siginfo_t info, Reap(pid));
  const bool good = info.si_code == CLD_EXITED && info.si_status == 0;
  // A Ctrl-C at a terminal reaches the child, too, and may end it first.
  if (!good && !cancelled && proceed) cancelled = !proceed(std::max(present(), before) - before);
  if (cancelled) return Error(Code::kCancelled, "layer.cancelled", "cancelled while downloading");
  if (good) return Ok();
  return Error(
      Code::kUnavailable, "layer.registry",
      fmt::format("skopeo ended by {} {}: {}", info.si_code == CLD_EXITED ? "code" : "signal",
                  info.si_status, OutputOf(output.get())));
}

Result<void> DropDamagedBlobs(int cache) {
  return DropBlobs(cache, "damaged", [](int dir, const std::string& name) -> Result<bool> {
    DSEC_TRY(const auto fd, os::OpenAt(dir, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    DSEC_TRY(const std::string digest, Sha256File(fd.get(), nullptr));
    return digest != name;
  });
}

Result<void> DropUnusedBlobs(int cache) {
  const int64_t oldest =
      UnixMillis(Clock::System().Wall()) / 1000 - std::chrono::seconds(kUnusedAge).count();
  return DropBlobs(cache, "unused", [&](int dir, const std::string& name) -> Result<bool> {
    struct stat status;
    if (::fstatat(dir, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return false;
    return status.st_mtim.tv_sec < oldest;
  });
}

}  // namespace dsec::image
