// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::blobfs {

// Runs this program again as the worker, with the same arguments otherwise, until one ends by
// itself; the exit status. Single-threaded.
int KeepWorker(char** argv);

}  // namespace dsec::blobfs
