// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "cli/commands.h"
#include "cli/pack_command.h"

namespace dsec::cli {

// Adds `gc`, `nodes` and `forget` to the `layer` command; `open` opens the store that its flags
// name. Where those name none and a node is named (--url, DSEC_URL), they ask that node.
void AddCollectCommands(CLI::App& layer, Context& context, StoreOpener open);

}  // namespace dsec::cli
