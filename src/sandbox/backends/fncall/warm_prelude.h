// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace dsec::sandbox {

// The program of a warm worker's Python. Its arguments are the modules to import. Descriptor 3 is
// this text, 4 the SEQPACKET link to the daemon.
//
// To the daemon: "R" once the modules are there, or "E" and why not. From it: one packet a fork,
// the program that takes away the fork's last right (classic BPF), with kForkFds descriptors: the
// namespaces of the cell, 0, 1 and 2 of the call, and the stream to the fork. The zygote answers
// "F" once that has been done, or "E" and why not.
//
// The fork says "R" over its stream when it is in its cell without any right, or "E" and why not.
// It reads the length of what follows as a decimal line, then strings, each ended by NUL: the path
// of the code, the number of arguments, the arguments, the environment.
inline constexpr int kForkFds = 9;
std::string_view WarmPrelude();

}  // namespace dsec::sandbox
