// SPDX-License-Identifier: Apache-2.0
#include "store/testing/etcd_cluster.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

namespace dsec::store::testing {
namespace {

constexpr int kReadyMs = 60'000;

std::string ClientUrl(size_t member) { return fmt::format("unix://localhost:{}", member); }
std::string PeerUrl(size_t member) { return fmt::format("unix://localhost:{}", 100 + member); }

// A socket for sd_notify(3): etcd says there when it serves.
os::UniqueFd NotifySocket(const std::string& path) {
  os::UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  std::filesystem::remove(path);
  EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

}  // namespace

EtcdCluster::EtcdCluster(size_t members) : pids_(members), notify_(members) {
  std::string pattern = (std::filesystem::temp_directory_path() / "dsec-etcd-XXXXXX").string();
  dir_ = mkdtemp(pattern.data());
  // A member serves once there is a majority, so all begin before one is waited for.
  for (size_t i = 0; i < members; ++i) Launch(i);
  for (size_t i = 0; i < members; ++i) WaitReady(i);
}

EtcdCluster::~EtcdCluster() {
  for (size_t i = 0; i < pids_.size(); ++i) Kill(i);
  std::filesystem::remove_all(dir_);
}

std::string EtcdCluster::Endpoint(size_t member) const {
  return fmt::format("unix:{}/localhost:{}", dir_, member);
}

std::vector<std::string> EtcdCluster::Endpoints() const {
  std::vector<std::string> all;
  for (size_t i = 0; i < size(); ++i) all.push_back(Endpoint(i));
  return all;
}

void EtcdCluster::Launch(size_t member) {
  const std::string notify = fmt::format("{}/notify{}", dir_, member);
  notify_[member] = NotifySocket(notify);
  std::filesystem::remove(fmt::format("{}/localhost:{}", dir_, member));
  std::filesystem::remove(fmt::format("{}/localhost:{}", dir_, 100 + member));
  std::string cluster;
  for (size_t i = 0; i < size(); ++i)
    cluster += fmt::format("{}m{}={}", i == 0 ? "" : ",", i, PeerUrl(i));
  const std::vector<std::string> words = {
      "etcd", "--name", fmt::format("m{}", member), "--data-dir", fmt::format("data{}", member),
      "--listen-client-urls", ClientUrl(member), "--advertise-client-urls", ClientUrl(member),
      "--listen-peer-urls", PeerUrl(member), "--initial-advertise-peer-urls", PeerUrl(member),
      "--initial-cluster", cluster, "--logger", "zap",
      // Data of a test need not survive a crash of the machine.
      "--unsafe-no-fsync"};
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const std::string log = fmt::format("{}/log{}", dir_, member);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (::getppid() != parent || ::chdir(dir_.c_str()) != 0 || ::dup2(out, 1) < 0 ||
        ::dup2(out, 2) < 0)
      ::_exit(126);
    ::setenv("NOTIFY_SOCKET", notify.c_str(), 1);
    ::execvp("etcd", arguments.data());
    ::_exit(127);
  }
  pids_[member] = pid;
}

void EtcdCluster::WaitReady(size_t member) {
  pollfd waits{notify_[member].get(), POLLIN, 0};
  ASSERT_EQ(::poll(&waits, 1, kReadyMs), 1) << "etcd (package etcd-server) did not start";
}

void EtcdCluster::Start(size_t member) {
  ASSERT_EQ(pids_[member], 0);
  Launch(member);
  WaitReady(member);
}

void EtcdCluster::Signal(size_t member, int signal) {
  ASSERT_GT(pids_[member], 0);
  ASSERT_EQ(::kill(pids_[member], signal), 0);
}

void EtcdCluster::Kill(size_t member) {
  if (pids_[member] == 0) return;
  ::kill(pids_[member], SIGKILL);
  ::waitpid(pids_[member], nullptr, 0);
  pids_[member] = 0;
}

}  // namespace dsec::store::testing
