// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/result.h"
#include "blobfs/settings.h"
#include "image/blob_server.h"
#include "os/process.h"
#include "os/unique_fd.h"

namespace dsec::blobfs {

struct ClientOptions {
  Settings settings;
  std::string run_dir;                                            // of the socket
  std::string program;                                            // dsec-blobfs
  std::chrono::milliseconds patience = std::chrono::seconds(30);  // of an Open
  metrics::Registry* registry = &metrics::Registry::Global();
};

// The daemon's end of dsec-blobfs: finds the one that runs or starts it, and holds the session's
// descriptors, so that either of them may die: a new one goes on with the session. Thread-safe.
class Client : public image::BlobServer {
 public:
  // kFailedPrecondition "layer.no_fuse": no FUSE here. Blocks for some seconds at most.
  static Result<std::unique_ptr<Client>> Start(ClientOptions options);
  // The process goes on.
  ~Client() override;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool remote() const override { return !options_.settings.url.empty(); }
  uint64_t session() const override;
  bool Damaged(const LayerId& id) const override;
  Result<Served> Open(const LayerId& id, bool with_meta) override;
  // The daemon ends and has no mounts any more: so does the process, unless sandboxes read.
  void Leave();

  // Ends the processes of a node and removes what they leave but the cached data. What was done,
  // for people. Nothing may use `dir` meanwhile.
  static Result<std::vector<std::string>> Purge(const std::string& dir, const std::string& run_dir,
                                                MonoTime deadline);

 private:
  struct Answer {
    std::string text;
    std::vector<os::UniqueFd> fds;
  };
  struct Call {
    bool done = false;
    Answer answer;
  };
  // Descriptors of a session, and what names it.
  struct Session {
    uint64_t number = 0;
    os::UniqueFd fuse;
    os::UniqueFd mount;
  };
  explicit Client(ClientOptions options) : options_(std::move(options)) {}
  Result<void> Connect();
  Result<void> Hello();
  Result<void> StartProcess(bool fresh);
  Result<Answer> Ask(const std::string& members, std::chrono::milliseconds patience);
  void Monitor(const std::stop_token& stop);
  void Receive(const std::stop_token& stop);
  void Take(const std::string& text, std::vector<os::UniqueFd> fds);
  void Count(const std::string& text);
  void Lost();
  Result<void> Restore();

  const ClientOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable_any changed_;
  std::shared_ptr<os::UniqueFd> socket_;  // null: not connected
  Session session_;
  std::map<uint64_t, std::shared_ptr<Call>> calls_;
  uint64_t next_call_ = 1;
  std::set<std::string> damaged_;            // hex
  std::map<std::string, uint64_t> counted_;  // of the worker, as told last
  os::PidFd keeper_;                         // if it is a child of ours
  std::jthread monitor_;                     // last
};

}  // namespace dsec::blobfs
