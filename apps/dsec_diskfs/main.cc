// SPDX-License-Identifier: Apache-2.0
#include "disk/worker.h"

int main(int argc, char** argv) { return dsec::disk::DiskfsMain(argc, argv); }
