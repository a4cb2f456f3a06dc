// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "aether/exec_table.h"
#include "aether/file_service.h"
#include "aether/init_client.h"
#include "aether/loop.h"
#include "aether/server.h"
#include "aether/worker_pool.h"
#include "spawn/agent_abi.h"

namespace dsec::aether {

// The agent of one sandbox: the Aether service of api/proto/dsec/v1/aether.proto between the edge's
// connections and the sandbox's init. State is in memory only and survives any number of edges; it
// ends with the sandbox.
class Agent {
 public:
  // Takes over the descriptors of spawn/agent_abi.h.
  static Result<std::unique_ptr<Agent>> Create();
  ~Agent();

  // Until the sandbox is over; returns why.
  std::string Run();

 private:
  Agent(std::unique_ptr<Loop> loop, std::unique_ptr<WorkerPool> workers, os::UniqueFd code_cgroup);

  void Handle(Server::Call call);
  void Dispatch(Server::Call& call);
  void Hello(Server::Call& call);
  void FinishHello(const Server::Respond& respond);
  void OnLost(const std::string& why);
  void OnIdle();

  std::unique_ptr<Loop> loop_;
  std::unique_ptr<WorkerPool> workers_;
  os::UniqueFd slot_cgroup_;
  os::UniqueFd memory_cgroup_;
  os::UniqueFd pids_cgroup_;
  os::UniqueFd cpu_cgroup_;
  os::UniqueFd code_cgroup_;
  std::array<uint8_t, spawn::abi::kTokenBytes> token_ = {};
  const uint64_t boot_nonce_;
  std::unique_ptr<InitClient> init_;
  std::unique_ptr<ExecTable> execs_;
  std::unique_ptr<FileService> files_;
  std::unique_ptr<Server> server_;
  os::UniqueFd init_pidfd_;
  FdWatch init_watch_;
  std::vector<Server::Respond> waiting_hellos_;  // until init is ready
  std::string lost_;
  Timer stop_;
  Timer trim_;
  bool trimmed_ = false;
};

}  // namespace dsec::aether
