// SPDX-License-Identifier: Apache-2.0
#include "sandbox/testing/leak_check.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/clock.h"
#include "os/file.h"
#include "os/process.h"
#include "sandbox/isolators/dir_list.h"

namespace dsec::sandbox::testing {
namespace {

std::vector<std::string> Lines(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::vector<DirEntry> Entries(const std::string& path) {
  auto entries = ListDir(AT_FDCWD, path.c_str());
  return entries.ok() ? std::move(*entries) : std::vector<DirEntry>();
}

// What the tests of this folder make bears this in its name; other tests may run beside them.
constexpr std::string_view kOurs = "dsec-tsb";

std::string LinkTarget(const std::string& path) {
  char target[4096];
  const ssize_t size = ::readlink(path.c_str(), target, sizeof(target));
  return size > 0 ? std::string(target, static_cast<size_t>(size)) : std::string();
}

}  // namespace

HostState HostState::Take(unsigned first_uid, unsigned last_uid) {
  HostState state;
  for (const DirEntry& entry : Entries("/proc/self/fd")) {
    const std::string target = LinkTarget("/proc/self/fd/" + entry.name);
    if (target.empty() || target.ends_with("/fd")) continue;  // the listing itself
    state.fds.push_back(fmt::format("fd {} {}", entry.name, target));
  }
  state.mounts = Lines("/proc/self/mountinfo");
  for (const DirEntry& entry : Entries("/sys/block")) {
    const auto file = Lines(fmt::format("/sys/block/{}/loop/backing_file", entry.name));
    if (!file.empty() && file[0].find(kOurs) != std::string::npos)
      state.loops.push_back(fmt::format("{} {}", entry.name, file[0]));
  }
  for (const DirEntry& hierarchy : Entries("/sys/fs/cgroup")) {
    const std::string root = "/sys/fs/cgroup/" + hierarchy.name;
    for (const DirEntry& top : Entries(root)) {
      if (!top.name.starts_with(kOurs)) continue;
      state.cgroups.push_back(root + "/" + top.name);
      for (const auto& below : std::filesystem::recursive_directory_iterator(
               root + "/" + top.name, std::filesystem::directory_options::skip_permission_denied)) {
        if (below.is_directory()) state.cgroups.push_back(below.path());
      }
    }
  }
  for (const DirEntry& process : Entries("/proc")) {
    struct stat info;
    if (process.name.find_first_not_of("0123456789") != std::string::npos) continue;
    if (::stat(("/proc/" + process.name).c_str(), &info) != 0) continue;
    // One that has ended and is just being reaped by the kernel is on its way, not left.
    auto alive = os::PidFd::Open(std::stoi(process.name));
    if (!alive.ok() || *alive->WaitExit(Clock::System().Mono())) continue;
    for (const std::string& line : Lines("/proc/" + process.name + "/status")) {
      unsigned uid = 0;
      if (std::sscanf(line.c_str(), "Uid:\t%u", &uid) == 1 && uid >= first_uid && uid <= last_uid) {
        state.agents.push_back(fmt::format("process {} of uid {}", process.name, uid));
      }
    }
  }
  return state;
}

std::vector<std::string> Leaks(const HostState& before, const HostState& after) {
  std::vector<std::string> leaks;
  for (const auto part : {&HostState::fds, &HostState::mounts, &HostState::loops,
                          &HostState::cgroups, &HostState::agents}) {
    for (const std::string& item : after.*part) {
      if (std::ranges::find(before.*part, item) == (before.*part).end()) leaks.push_back(item);
    }
  }
  return leaks;
}

std::string WhatIsMissing() {
  if (::geteuid() != 0) return "needs root";
  if (::prctl(PR_CAPBSET_READ, 21 /* CAP_SYS_ADMIN */, 0, 0, 0) != 1) return "needs CAP_SYS_ADMIN";
  return "";
}

}  // namespace dsec::sandbox::testing
