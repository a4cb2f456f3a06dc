// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/result.h"
#include "os/unique_fd.h"

namespace dsec::guest {

// Finds the beginnings of host connections in what comes out of the port (docs/design/vm.md,
// section 4). A value machine without I/O.
class SyncFinder {
 public:
  explicit SyncFinder(std::string secret) : secret_(std::move(secret)) {}

  struct Step {
    std::string data;       // for the agent, of the connection that was current until now
    bool synced = false;    // a new connection begins after `data`
    std::string nonce;      // of it
    std::string_view rest;  // of the fed bytes: feed them again
  };
  // Never holds back more than a secret and a nonce.
  Step Feed(std::string_view bytes);

 private:
  const std::string secret_;
  std::string held_;  // a prefix of secret + nonce
};

// Passes bytes between the host's port and the agent's socket: one host connection, one agent
// connection. Buffers are bounded; who does not read is not read from.
class Relay {
 public:
  // `connect` makes a new connection to the agent (non-blocking).
  Relay(int port, std::string secret, std::function<Result<os::UniqueFd>()> connect);

  int port() const { return port_; }
  int agent() const { return agent_.get(); }  // -1: none
  // What to wait for on the agent's socket, as poll(2) says it. The port is edge-triggered.
  short AgentEvents() const;
  // Moves what can be moved now. An error is of the port, which is the end of the machine's use.
  Result<void> Pump();

 private:
  Result<bool> ReadPort();
  bool WriteAgent();
  bool ReadAgent();
  Result<bool> WritePort();
  void Take(std::string_view bytes);
  void Begin(const std::string& nonce);
  void DropAgent();

  const int port_;
  const std::string secret_;
  const std::function<Result<os::UniqueFd>()> connect_;
  SyncFinder finder_;
  os::UniqueFd agent_;
  std::string to_agent_;
  std::string to_port_;
};

}  // namespace dsec::guest
