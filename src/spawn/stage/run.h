// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsec::spawn::stage {

// The whole of dsec-spawner. Descriptor 3 is its control socket: one wire::Start packet first, then
// wire::Slot packets, each answered by a wire::Reply. Ends at end of file. Host root,
// single-threaded, serves one slot at a time.
int RunSpawner(char** argv);

}  // namespace dsec::spawn::stage
