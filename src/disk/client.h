// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "blobfs/settings.h"
#include "os/process.h"
#include "os/unique_fd.h"

namespace dsec::disk {

inline constexpr char kDiskSocketName[] = "diskfs.sock";

struct ClientOptions {
  // As for dsec-blobfs: dir, root or url of published layers, cache.
  blobfs::Settings settings;
  std::string run_dir;                                            // of the socket
  std::string program;                                            // dsec-diskfs
  std::chrono::milliseconds patience = std::chrono::seconds(30);  // of a call
};

// The other end of dsec-diskfs: finds the one that runs or starts it, and holds the session's
// descriptors, so that either of them may die: a new one goes on with the session (as
// blobfs::Client). Thread-safe. Errors: kUnavailable "layer.unreachable" when the process does not
// answer, those of disks.
class Client {
 public:
  // Blocks for some seconds at most. kFailedPrecondition "layer.no_fuse".
  static Result<std::unique_ptr<Client>> Start(ClientOptions options);
  // The process goes on.
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  struct Opened {
    uint64_t node = 0;
    uint64_t bytes = 0;
  };
  // Serves the disk in a folder, if it is not yet.
  Result<Opened> Open(const std::string& dir);
  // Its file: `flags` as for open(2); with O_DIRECT past the page cache.
  Result<os::UniqueFd> OpenFile(uint64_t node, int flags) const;
  // The detached mount with a file <node> for each disk: for the mount namespace of a VMM.
  Result<os::UniqueFd> Mount() const;
  // Serves it by NBD, too. Not for writing while its file is written through the page cache, which
  // would not know.
  Result<void> ServeNbd(uint64_t node, const std::string& socket);
  struct Sealed {
    std::string path;
    std::string uuid;
    double took_ms = 0;
  };
  Result<Sealed> Seal(uint64_t node);
  Result<Sealed> Collapse(uint64_t node, uint64_t first, uint64_t count);
  // Members of the answer, as JSON.
  Result<std::string> Info(uint64_t node);
  // Flushes and ends serving it. kConflict "disk.in_use" while its file is open, unless `force`.
  Result<void> Close(uint64_t node, bool force);
  // Of the session; another one: files of the one before are dead.
  uint64_t session() const;

  // Ends the processes of a node and removes what they leave but disks and cache. What was done,
  // for people.
  static Result<std::vector<std::string>> Purge(const std::string& dir, const std::string& run_dir,
                                                MonoTime deadline);

 private:
  explicit Client(ClientOptions options) : options_(std::move(options)) {}
  std::string SocketPath() const { return options_.run_dir + "/" + kDiskSocketName; }
  Result<os::UniqueFd> Hello();
  Result<os::UniqueFd> Restore();
  Result<void> StartProcess(bool fresh);
  Result<std::string> Ask(const std::string& request);
  void Monitor(const std::stop_token& stop, os::UniqueFd socket);

  const ClientOptions options_;
  mutable std::mutex mutex_;  // of all below
  uint64_t session_ = 0;
  os::UniqueFd fuse_;
  os::UniqueFd mount_;
  std::condition_variable_any restored_;
  std::counting_semaphore<4> calls_{4};
  os::PidFd keeper_;      // if it is a child of ours; the monitor's
  int watched_ = -1;      // socket of the monitor
  std::jthread monitor_;  // last
};

}  // namespace dsec::disk
