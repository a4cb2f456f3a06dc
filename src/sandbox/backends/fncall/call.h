// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "sandbox/backends/fncall/worker_host.h"
#include "sandbox/fn_backend.h"

namespace dsec::sandbox {

// Runs one call in a cell, from its files to its verdict, on the calling thread. When it returns,
// nothing of the program runs any more; what else there is to end of the cell is left to EndCell.
// `cancel`, a descriptor that becomes readable, kills the call: kCancelled.
//
// A report with `dirty` or any error but "fn.exec_failed" means that the worker is over.
Result<FnReport> RunCall(WorkerHost& worker, Cell& cell, const FnRun& run, int cancel);

}  // namespace dsec::sandbox
