// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "os/unique_fd.h"

namespace dsec::store::testing {

// Members of an etcd cluster of the test's own: processes of Debian's etcd-server that speak over
// Unix sockets below one temporary folder. Failures are gtest failures.
class EtcdCluster {
 public:
  explicit EtcdCluster(size_t members);
  // Kills them and removes the folder.
  ~EtcdCluster();
  EtcdCluster(const EtcdCluster&) = delete;
  EtcdCluster& operator=(const EtcdCluster&) = delete;

  size_t size() const { return pids_.size(); }
  std::string Endpoint(size_t member) const;
  std::vector<std::string> Endpoints() const;
  // Starts a member that is not there and waits until it serves. All at first.
  void Start(size_t member);
  void Signal(size_t member, int signal);
  // kill -9, and waits for its end.
  void Kill(size_t member);

 private:
  void Launch(size_t member);
  void WaitReady(size_t member);

  std::string dir_;
  std::vector<pid_t> pids_;  // 0: not there
  std::vector<os::UniqueFd> notify_;
};

}  // namespace dsec::store::testing
