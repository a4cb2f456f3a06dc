// SPDX-License-Identifier: Apache-2.0
// A fork of a zygote has entered its cell and given up its rights by code of the layer. Whether it
// has is found out here, from what the kernel says of it, before it gets anything of a call.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <string_view>

#include "os/file.h"
#include "sandbox/backends/fncall/call_files.h"
#include "sandbox/backends/fncall/warm.h"
#include "sandbox/isolators/control_file.h"
#include "spawn/wire.h"

namespace dsec::sandbox {
namespace {

constexpr size_t kMaxFile = 16384;
// Beyond those of the daemon itself: two of the spawner, the zygote's, the fork's own.
constexpr uint64_t kFilters = 4;
constexpr int kDescriptors = 4;  // 0, 1, 2 and its link

Error Wrong(std::string what) {
  return Error(Code::kUnavailable, "fn.worker_broken",
               "a fork of the warm interpreter is not confined: " + std::move(what));
}

// The line of `key` in a status file, without it; see proc_pid_status(5).
std::string_view Field(std::string_view status, std::string_view key) {
  while (!status.empty()) {
    const size_t end = std::min(status.find('\n'), status.size());
    std::string_view line = status.substr(0, end);
    status.remove_prefix(std::min(end + 1, status.size()));
    if (line.starts_with(key) && line.substr(key.size()).starts_with(":"))
      return line.substr(key.size() + 1);
  }
  return {};
}

bool AllAre(std::string_view words, std::string_view expected) {
  size_t count = 0;
  for (auto word = TakeWord(words); !word.empty(); word = TakeWord(words), ++count) {
    if (word != expected) return false;
  }
  return count > 0;
}

Result<void> CheckStatus(std::string_view status, const ForkPlace& place, uint64_t own_filters) {
  for (const char* key : {"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"}) {
    if (!AllAre(Field(status, key), "0000000000000000"))
      return Wrong(fmt::format("{}{}", key, Field(status, key)));
  }
  const std::string owner = fmt::format("{}", place.owner);
  for (const char* key : {"Uid", "Gid"}) {
    if (!AllAre(Field(status, key), owner))
      return Wrong(fmt::format("{}{}", key, Field(status, key)));
  }
  std::string_view groups = Field(status, "Groups");
  if (!TakeWord(groups).empty()) return Wrong("it has groups");
  const struct {
    const char* key;
    std::string value;
  } exact[] = {{"NoNewPrivs", "1"},
               {"Seccomp", "2"},
               {"Seccomp_filters", fmt::format("{}", own_filters + kFilters)},
               {"Threads", "1"},
               {"PPid", fmt::format("{}", place.runner)},
               {"TracerPid", "0"}};
  for (const auto& [key, value] : exact) {
    if (!AllAre(Field(status, key), value))
      return Wrong(fmt::format("{}{} instead of {}", key, Field(status, key), value));
  }
  return Ok();
}

bool Same(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

// What `name` of the process leads to is what `fd` is.
Result<void> CheckIs(int dir, const char* name, int fd, const char* path = "") {
  struct stat there, here;
  if (::fstatat(dir, name, &there, 0) != 0) return Wrong(fmt::format("{} is not to be seen", name));
  if (::fstatat(fd, path, &here, AT_EMPTY_PATH) != 0) return os::ErrnoError("fn.warm", name);
  return Same(there, here) ? Ok() : Wrong(fmt::format("its {} is another", name));
}

Result<void> CheckPlace(int dir, const ForkPlace& place) {
  constexpr const char* kNames[spawn::wire::kCellNamespaces] = {"ns/pid", "ns/mnt", "ns/ipc",
                                                                "ns/net"};
  for (size_t i = 0; i < std::size(kNames); ++i)
    DSEC_TRY_VOID(CheckIs(dir, kNames[i], place.cell->namespaces[i].get()));
  // Of what it would be a child of.
  DSEC_TRY_VOID(CheckIs(dir, "ns/pid_for_children", place.cell->namespaces[0].get()));
  DSEC_TRY_VOID(CheckIs(dir, "ns/user", place.user_ns));
  DSEC_TRY_VOID(CheckIs(dir, "root", place.root));
  return CheckIs(dir, "cwd", place.root, kWorkFolder);
}

Result<void> CheckFiles(int dir, const Program& program, const struct stat& link) {
  DSEC_TRY_VOID(CheckIs(dir, "fd/0", program.in.get()));
  DSEC_TRY_VOID(CheckIs(dir, "fd/1", program.out.get()));
  DSEC_TRY_VOID(CheckIs(dir, "fd/2", program.err.get()));
  struct stat third;
  if (::fstatat(dir, "fd/3", &third, 0) != 0 || !Same(third, link))
    return Wrong("its fd/3 is another");
  os::UniqueFd fds(::openat(dir, "fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fds.valid()) return Wrong("fd is not to be seen");
  const std::unique_ptr<DIR, int (*)(DIR*)> list(::fdopendir(fds.Release()), ::closedir);
  int count = 0;
  while (const dirent* entry = ::readdir(list.get())) count += entry->d_name[0] != '.' ? 1 : 0;
  return count == kDescriptors ? Ok() : Wrong(fmt::format("it has {} descriptors", count));
}

Result<void> CheckGroup(pid_t pid, int group) {
  DSEC_TRY(const auto text, os::ReadFile(group, "cgroup.procs", kMaxFile));
  std::string_view words = text;
  for (auto word = TakeWord(words); !word.empty(); word = TakeWord(words)) {
    if (word == fmt::format("{}", pid)) return Ok();
  }
  return Wrong("it is in another cgroup");
}

}  // namespace

Result<void> CheckFork(const os::PidFd& process, const Program& program, const struct stat& link,
                       const ForkPlace& place, int32_t* pid) {
  const os::UniqueFd dir(
      ::open(fmt::format("/proc/{}", process.pid()).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!dir.valid()) return Wrong("it has ended");
  DSEC_TRY(const auto own, os::ReadFile(AT_FDCWD, "/proc/self/status", kMaxFile));
  auto status = os::ReadFile(dir.get(), "status", kMaxFile);
  if (!status.ok()) return Wrong("it has ended");
  std::string_view filters = Field(own, "Seccomp_filters");
  const uint64_t own_filters = ToNumber(TakeWord(filters));
  DSEC_TRY_VOID(CheckStatus(*status, place, own_filters));
  DSEC_TRY_VOID(CheckPlace(dir.get(), place));
  DSEC_TRY_VOID(CheckFiles(dir.get(), program, link));
  DSEC_TRY_VOID(CheckGroup(process.pid(), place.cell->group.get()));
  // The last but one: it is one level below the runner.
  std::string_view numbers = Field(*status, "NSpid");
  uint64_t last = 0;
  for (auto word = TakeWord(numbers); !word.empty(); word = TakeWord(numbers)) {
    *pid = static_cast<int32_t>(last);
    last = ToNumber(word);
  }
  return *pid > 0 ? Ok() : Wrong("its numbers are not known");
}

}  // namespace dsec::sandbox
