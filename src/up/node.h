// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "base/log.h"
#include "base/result.h"
#include "blobfs/client.h"
#include "config/node_config.h"
#include "edge/options.h"
#include "fn/options.h"
#include "image/layer_mounts.h"
#include "os/unique_fd.h"
#include "sandbox/backends/container/container_backend.h"
#include "sandbox/backends/fncall/fncall_backend.h"
#include "sandbox/backends/microvm/microvm_backend.h"

namespace dsec::up {

// Held while a daemon (or purge) owns the state folder: <state_dir>/edge.lock. kConflict
// "node.locked" when another process has it. Makes the folder (0700) if it is missing.
Result<os::UniqueFd> LockState(const std::string& state_dir);

// <state_dir>/api_key (0600): read, or made once from the kernel's generator.
Result<std::string> LoadApiKey(const std::string& state_dir);

// The settings as the parts take them.
Result<sandbox::ContainerOptions> ContainerOptionsOf(const config::NodeConfig& config);
edge::EdgeOptions EdgeOptionsOf(const config::NodeConfig& config, const std::string& scratch_path);
Result<sandbox::MicroVmOptions> MicroVmOptionsOf(const config::NodeConfig& config);
sandbox::FnCallOptions FnCallOptionsOf(const config::NodeConfig& config);
Result<fn::FnOptions> FnOptionsOf(const config::NodeConfig& config);
std::string LayersDir(const config::NodeConfig& config);
image::LayerMountOptions LayerMountOptionsOf(const config::NodeConfig& config);
// Of the process that serves checked content.
std::string BlobfsDir(const config::NodeConfig& config);
bool WantsBlobfs(const config::NodeConfig& config);
Result<blobfs::ClientOptions> BlobfsOptionsOf(const config::NodeConfig& config);
// As the settings say.
log::Options LogOptionsOf(const config::NodeConfig& config);
size_t ShardCount(const config::NodeConfig& config);

// Raises the soft RLIMIT_NOFILE to the hard one.
Result<void> RaiseOpenFiles();
// Tells a service manager, if one asked (NOTIFY_SOCKET), that the daemon is ready: sd_notify(3).
void NotifyReady();

}  // namespace dsec::up
