// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::disk {

// dsec-diskfs keeper|worker CONFIG SESSION, with descriptors as blobfs/settings.h numbers them. The
// exit code.
int DiskfsMain(int argc, char** argv);

}  // namespace dsec::disk
