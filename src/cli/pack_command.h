// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>
#include <functional>
#include <memory>

#include "cli/commands.h"
#include "image/layer_store.h"

namespace dsec::cli {

using StoreOpener = std::function<Result<std::unique_ptr<image::LayerStore>>()>;

// Adds `pack`, `flatten` and `compress` to the `layer` command; `open` opens the store that its
// flags name.
void AddPackCommands(CLI::App& layer, Context& context, StoreOpener open);

}  // namespace dsec::cli
