// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>

#include "cli/commands.h"
#include "cli/pack_command.h"

namespace dsec::cli {

// Adds `export` and `index` to the `layer` command; `open` opens the store that its flags name.
void AddSharingCommands(CLI::App& layer, Context& context, StoreOpener open);

}  // namespace dsec::cli
