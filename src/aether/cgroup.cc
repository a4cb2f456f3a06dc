// SPDX-License-Identifier: Apache-2.0
#include "aether/cgroup.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <utility>

#include "os/file.h"

namespace dsec::aether {
namespace {

constexpr size_t kMaxKernelFile = 1 << 20;

std::string ReadOrEmpty(int dirfd, const char* name) {
  Result<std::string> text = os::ReadFile(dirfd, name, kMaxKernelFile);
  return text.ok() ? std::move(text).value() : std::string();
}

}  // namespace

uint64_t KernelValue(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.starts_with(key) || line.size() <= key.size() || line[key.size()] != ' ') continue;
    line.remove_prefix(key.size() + 1);
    uint64_t value = 0;
    std::from_chars(line.data(), line.data() + line.size(), value);
    return value;
  }
  return 0;
}

Result<std::unique_ptr<ExecCgroup>> ExecCgroup::Create(int slot, const std::string& name) {
  std::string path = "code/" + name;
  if (::mkdirat(slot, path.c_str(), 0755) != 0) {
    return Error::FromErrno(errno, "exec.cgroup", fmt::format("mkdir {}", path));
  }
  std::unique_ptr<ExecCgroup> cgroup(new ExecCgroup(slot, std::move(path)));
  DSEC_TRY(cgroup->dir_, os::OpenAt(slot, cgroup->path_.c_str(), O_RDONLY | O_DIRECTORY));
  // Init clones into it with the identity of the sandbox's root, which is 1:1 here.
  if (::fchownat(cgroup->dir_.get(), "cgroup.procs", 1, 1, 0) != 0) {
    return Error::FromErrno(errno, "exec.cgroup", "chown cgroup.procs");
  }
  return cgroup;
}

Result<void> ExecCgroup::Kill() const { return os::WriteExisting(dir_.get(), "cgroup.kill", "1"); }

std::vector<int> ExecCgroup::Processes() const {
  std::vector<int> pids;
  std::string text = ReadOrEmpty(dir_.get(), "cgroup.procs");
  const char* position = text.data();
  const char* end = text.data() + text.size();
  while (position < end) {
    int pid = 0;
    auto [next, failure] = std::from_chars(position, end, pid);
    if (failure == std::errc() && pid > 0) pids.push_back(pid);
    position = next + 1;
  }
  return pids;
}

Result<void> ExecCgroup::Enter(int pid) const {
  if (pid <= 0)
    return Error(Code::kNotFound, "exec.cgroup", "no such process");  // 0 would mean the agent
  return os::WriteExisting(dir_.get(), "cgroup.procs", fmt::format("{}", pid));
}

CpuTimes ExecCgroup::Cpu() const {
  std::string text = ReadOrEmpty(dir_.get(), "cpu.stat");
  return {KernelValue(text, "user_usec"), KernelValue(text, "system_usec"),
          KernelValue(text, "throttled_usec")};
}

uint64_t ExecCgroup::Value(const char* file, std::string_view key) const {
  std::string text = ReadOrEmpty(dir_.get(), file);
  if (!key.empty()) return KernelValue(text, key);
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

bool ExecCgroup::Has(const char* file) const { return ::faccessat(dir_.get(), file, F_OK, 0) == 0; }

bool ExecCgroup::Populated() const {
  return KernelValue(ReadOrEmpty(dir_.get(), "cgroup.events"), "populated") != 0;
}

void ExecCgroup::WhenEmpty(Loop& loop, Loop::Callback callback) {
  StopWaiting();
  Result<os::UniqueFd> events = os::OpenAt(dir_.get(), "cgroup.events", O_RDONLY);
  if (events.ok()) events_ = std::move(events).value();
  auto empty = [this] {
    char text[256];
    ssize_t size = ::pread(events_.get(), text, sizeof(text), 0);
    return size <= 0 || KernelValue({text, static_cast<size_t>(size)}, "populated") == 0;
  };
  // Reading arms it: EPOLLPRI comes with each change after the last read (cgroup-v2.rst).
  if (empty()) {
    already_ = Timer(loop, loop.now(), std::move(callback));
    return;
  }
  watch_ = FdWatch(loop, events_.get(), EPOLLPRI,
                   [this, empty, callback = std::move(callback)](uint32_t) {
                     if (!empty()) return;
                     Loop::Callback call = callback;
                     StopWaiting();
                     call();
                   });
}

void ExecCgroup::StopWaiting() {
  already_.Reset();
  watch_.Reset();
  events_.Reset();
}

bool ExecCgroup::Remove() {
  if (slot_ < 0) return true;
  StopWaiting();
  if (::unlinkat(slot_, path_.c_str(), AT_REMOVEDIR) != 0 && errno != ENOENT) return false;
  slot_ = -1;
  return true;
}

}  // namespace dsec::aether
