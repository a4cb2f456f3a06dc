// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace dsec::cli {

// A command that another part brings in (the daemons); gets the words after its own name, argv[0]
// first.
struct ExtraCommand {
  std::string name;
  std::string description;
  int (*run)(int argc, char** argv);
};

// The whole command line. Returns the exit code of the process.
int CliMain(int argc, char** argv, const std::vector<ExtraCommand>& extras);

}  // namespace dsec::cli
