// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace dsec::sandbox::testing {

// What of a test could stay on the host: taken before it, compared after it.
struct HostState {
  std::vector<std::string> fds;      // of this process: number and target
  std::vector<std::string> mounts;   // /proc/self/mountinfo
  std::vector<std::string> loops;    // attached devices and their files
  std::vector<std::string> cgroups;  // directories named dsec-t* in every hierarchy, and below
  std::vector<std::string> agents;   // processes whose uid lies in `first_uid` ... `last_uid`

  static HostState Take(unsigned first_uid, unsigned last_uid);
};

// One line for each thing that is in `after` and was not in `before`.
std::vector<std::string> Leaks(const HostState& before, const HostState& after);

// Why privileged tests cannot run here; empty when they can.
std::string WhatIsMissing();

}  // namespace dsec::sandbox::testing
