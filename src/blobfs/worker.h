// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::blobfs {

// `dsec-blobfs keeper|worker CONFIG SESSION`: the program's main. Both are started with the
// descriptors of settings.h.
//
// The keeper does nothing but hold them, start the worker, and start it again when it dies: while
// one descriptor of /dev/fuse is open anywhere, the session lasts, and a new worker asks the kernel
// for the requests that the one before had taken. The worker serves files until the session ends,
// without any capability. Both outlive the daemon.
int BlobfsMain(int argc, char** argv);

}  // namespace dsec::blobfs
