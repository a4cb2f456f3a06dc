// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/id.h"
#include "base/log.h"
#include "base/result.h"

// What the daemon and the process that serves files say to each other, and where.
//
// <dir>/config.json      the settings, written by the daemon before it starts or meets the process
// <dir>/lock             flock; held while the keeper or its worker lives
// <dir>/keeper.pid, worker.pid   "PID START_TIME", written by each as the first thing it does
// <dir>/served           hex of each layer that the session has a file for, one a line
// <dir>/max_pages_limit  what fs.fuse.max_pages_limit was, while it is raised
// <run_dir>/blobfs.sock  SEQPACKET; one JSON object a packet
namespace dsec::blobfs {

struct Settings {
  std::string dir;           // of the files above
  std::string root;          // of the layer store; read when there is no URL
  std::string url;           // of an object store; empty: none
  std::string headers_file;  // with it
  std::string ca_file;       // with it
  std::string cache_dir;
  uint64_t cache_bytes = 0;
  log::Options log;

  std::string Encode() const;
  // kInvalidArgument "layer.source".
  static Result<Settings> Parse(std::string_view text);
};

inline constexpr char kConfigName[] = "config.json";
inline constexpr char kLockName[] = "lock";
inline constexpr char kKeeperName[] = "keeper.pid";
inline constexpr char kWorkerName[] = "worker.pid";
inline constexpr char kServedName[] = "served";
inline constexpr char kLimitName[] = "max_pages_limit";
inline constexpr char kSocketName[] = "blobfs.sock";

// Descriptors that the keeper and the worker are started with.
inline constexpr int kFuseFd = 3;
inline constexpr int kMountFd = 4;
inline constexpr int kListenFd = 5;
inline constexpr int kLockFd = 6;

inline constexpr size_t kMaxPacket = 32 << 10;
inline constexpr size_t kMaxManifest = 1 << 20;

// Writes <dir>/<name> of this process.
Result<void> WritePidFile(const std::string& dir, const char* name);

// An error that has come over the socket; "layer.io" when this program does not know its reason.
Error ErrorOf(std::string_view reason, std::string message);

}  // namespace dsec::blobfs
