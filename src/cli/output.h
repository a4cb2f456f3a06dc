// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/result.h"

namespace dsec::cli {

// Exit codes of the command line beside those that a command inside passes on.
constexpr int kExitTimeout = 124;     // the command's time limit
constexpr int kExitPlatform = 125;    // the platform or this tool failed; never the command
constexpr int kExitCannotRun = 126;   // found but cannot be started
constexpr int kExitNotFound = 127;    // no such program inside
constexpr int kExitSignalBase = 128;  // plus the signal
constexpr int kExitCancelled = 130;   // ended on request

// Prints "dsec: reason: text" with a hint where there is one; returns kExitPlatform.
int Fail(const Error& error);

// Rows under a header, columns as wide as their widest cell; control characters are shown as '?'.
std::string Table(const std::vector<std::string>& header,
                  const std::vector<std::vector<std::string>>& rows);

// "128m", "1.5g", "4096" (bytes; k, m, g, t are powers of 1024) and "90", "1.5m", "2h", "500ms"
// (seconds by default). kInvalidArgument names the flag.
Result<uint64_t> ParseSize(std::string_view text, std::string_view flag);
Result<uint64_t> ParseMillis(std::string_view text, std::string_view flag);
// KEY=VALUE words of --label.
Result<std::map<std::string, std::string>> ParseLabels(const std::vector<std::string>& words);
std::string ShowSize(uint64_t bytes);  // "1.5 MiB"
std::string ShowAge(int64_t milliseconds);

void PrintJson(const nlohmann::json& value);
// The first of `count` warnings, to stderr.
void PrintWarnings(const std::vector<std::string>& warnings, uint64_t count);

// What a finished exec means for this process.
int ExitCode(const nlohmann::json& result);
// One line for stderr when the end was not an exit code, empty otherwise.
std::string Explain(const nlohmann::json& result);
// The same of a stateless call; its line says the verdict, whatever it is.
int FnExitCode(const nlohmann::json& result);
std::string FnExplain(const nlohmann::json& result);

}  // namespace dsec::cli
