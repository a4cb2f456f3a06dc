// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "base/result.h"
#include "os/unique_fd.h"

// The Network Block Device protocol (NetworkBlockDevice/nbd, doc/proto.md): fixed newstyle, simple
// replies; READ, WRITE, FLUSH, TRIM, WRITE_ZEROES, FUA. The client is hostile: each number that it
// sends is bounded before it is used.
namespace dsec::disk {

class Disk;

// What is served. Offsets and lengths are within size(). Thread-safe.
class NbdTarget {
 public:
  using Done = std::function<void(Result<void>)>;
  virtual ~NbdTarget() = default;
  virtual uint64_t size() const = 0;
  virtual void Read(uint64_t offset, std::span<uint8_t> out, Done done) = 0;
  virtual Result<void> Write(uint64_t offset, std::span<const uint8_t> data) = 0;
  virtual Result<void> Zero(uint64_t offset, uint64_t size) = 0;
  virtual Result<void> Flush() = 0;
};
std::unique_ptr<NbdTarget> NbdTargetOf(std::shared_ptr<Disk> disk);

// One direction each of a connection.
class NbdStream {
 public:
  virtual ~NbdStream() = default;
  // False: the end came first.
  virtual bool ReadExact(std::span<uint8_t> out) = 0;
  // Several threads, each a whole message. False: nobody is there any more.
  virtual bool Write(std::span<const std::span<const uint8_t>> parts) = 0;
  // The handshake is over: a client may be silent from now on.
  virtual void NoTimeout() {}
};

inline constexpr uint32_t kNbdMaxRequest = 32 << 20;
inline constexpr uint32_t kNbdMaxOption = 4096;
inline constexpr int kNbdMaxOptions = 64;
inline constexpr int kNbdMaxReads = 16;             // under way of one connection
inline constexpr uint64_t kNbdMaxBytes = 64 << 20;  // of their buffers

// Serves one connection until its end, which is the client's, or that of its manners: why, for the
// log. Every reply has been given or dropped when it returns.
std::string ServeNbd(const std::shared_ptr<NbdStream>& stream, NbdTarget& target);

// Serves a target on a Unix socket. Thread-safe.
class NbdServer {
 public:
  static constexpr size_t kMaxConnections = 16;
  // What stands at `path` goes; the socket is 0600. "disk.io".
  static Result<std::unique_ptr<NbdServer>> Start(const std::string& path,
                                                  std::shared_ptr<NbdTarget> target);
  // Ends all connections.
  ~NbdServer();
  const std::string& path() const { return path_; }

 private:
  struct Connection {
    os::UniqueFd socket;
    std::jthread thread;
    bool ended = false;
  };
  NbdServer(std::string path, std::shared_ptr<NbdTarget> target, os::UniqueFd listen);
  void Accept(const std::stop_token& stop);

  const std::string path_;
  const std::shared_ptr<NbdTarget> target_;
  const os::UniqueFd listen_;
  std::mutex mutex_;
  std::list<Connection> connections_;
  std::jthread accept_;  // last
};

}  // namespace dsec::disk
