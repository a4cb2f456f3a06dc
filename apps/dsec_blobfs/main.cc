// SPDX-License-Identifier: Apache-2.0
#include "blobfs/worker.h"

int main(int argc, char** argv) { return dsec::blobfs::BlobfsMain(argc, argv); }
