// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/clock.h"
#include "base/result.h"
#include "os/process.h"
#include "os/unique_fd.h"

// The processes that serve files, from outside: who they are, how they are started and ended. Used
// for dsec-blobfs and dsec-diskfs; each has a folder with a lock and pid files (settings.h).
namespace dsec::blobfs {

// The process that the pid file <dir>/<name> names, if it lives.
os::PidFd ProcessOf(const std::string& dir, const char* name);
// Kills whoever holds <dir>/lock and takes it. `killed` (may be null): set when somebody was.
Result<os::UniqueFd> TakeLock(const std::string& dir, MonoTime deadline, bool* killed);
// SEQPACKET sockets; what stands at the path goes.
Result<os::UniqueFd> ListenAt(const std::string& path);
Result<os::UniqueFd> ConnectTo(const std::string& path);

struct KeeperStart {
  std::string program;
  std::string name;     // argv[0]
  std::string config;   // path
  std::string session;  // number
  int fuse = -1, mount = -1, listen = -1, lock = -1;
};
// `program` keeper <config> <session>, with the descriptors as settings.h numbers them.
Result<os::PidFd> StartKeeper(const KeeperStart& start);

// no_new_privs and no capabilities: root's files are opened as root, all else is not the process's
// affair.
Result<void> DropRights();

}  // namespace dsec::blobfs
