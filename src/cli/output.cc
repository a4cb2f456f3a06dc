// SPDX-License-Identifier: Apache-2.0
#include "cli/output.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace dsec::cli {
namespace {

// A number with a unit; nullopt-like false when it is malformed, negative or too large.
bool ParseScaled(std::string_view text,
                 const std::vector<std::pair<std::string_view, double>>& units, double plain,
                 uint64_t& out) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || !std::isfinite(value) || value < 0)
    return false;
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  double factor = plain;
  if (!unit.empty()) {
    const auto found = std::find_if(units.begin(), units.end(),
                                    [&](const auto& known) { return known.first == unit; });
    if (found == units.end()) return false;
    factor = found->second;
  }
  const double scaled = std::round(value * factor);
  if (scaled > 9e15) return false;
  out = static_cast<uint64_t>(scaled);
  return true;
}

Error BadValue(std::string_view flag, std::string_view text, std::string_view rule) {
  return Error(Code::kInvalidArgument, "cli.value",
               fmt::format("{}: {} is not {}", flag, text, rule));
}

std::string Clean(const std::string& text) {
  std::string out = text;
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 32 || c == 127) c = '?';
  }
  return out;
}

}  // namespace

int Fail(const Error& error) {
  std::string line = fmt::format("{}: {}", error.reason(), error.message());
  if (!error.field().empty()) line += fmt::format(" (field {})", error.field());
  std::fprintf(stderr, "dsec: %s\n", Clean(line).c_str());
  if (error.reason() == "client.unreachable" || error.reason() == "client.connection") {
    std::fprintf(stderr, "dsec: is the platform running? start it with `dsec up`\n");
  } else if (error.reason() == "layer.not_found") {
    std::fprintf(stderr, "dsec: `dsec layer ls` lists what there is\n");
  } else if (error.reason() == "layer.in_use") {
    std::fprintf(stderr, "dsec: end the sandboxes that use it first (`dsec ps`)\n");
  } else if (error.reason() == "layer.no_space") {
    std::fprintf(stderr, "dsec: free space, or name another store with --layers\n");
  }
  return kExitPlatform;
}

std::string Table(const std::vector<std::string>& header,
                  const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& title : header) widths.push_back(title.size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  const auto add = [&](const std::vector<std::string>& row) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string cell = Clean(row[i]);
      out += cell;
      if (i + 1 < row.size()) out.append(widths[i] - cell.size() + 2, ' ');
    }
    out += '\n';
  };
  add(header);
  for (const auto& row : rows) add(row);
  return out;
}

Result<uint64_t> ParseSize(std::string_view text, std::string_view flag) {
  static const std::vector<std::pair<std::string_view, double>> kUnits = {
      {"b", 1.0},      {"k", 0x1p10},   {"m", 0x1p20},  {"g", 0x1p30}, {"t", 0x1p40},
      {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},  {"T", 0x1p40}, {"KiB", 0x1p10},
      {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  uint64_t value = 0;
  if (!ParseScaled(text, kUnits, 1.0, value)) {
    return BadValue(flag, text, "a size such as 4096, 128m or 1.5g");
  }
  return value;
}

Result<uint64_t> ParseMillis(std::string_view text, std::string_view flag) {
  static const std::vector<std::pair<std::string_view, double>> kUnits = {
      {"ms", 1.0}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}, {"d", 8.64e7}};
  uint64_t value = 0;
  if (!ParseScaled(text, kUnits, 1e3, value)) {
    return BadValue(flag, text, "a time such as 90, 500ms, 1.5m or 2h");
  }
  return value;
}

std::string ShowSize(uint64_t bytes) {
  constexpr std::string_view kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string ShowAge(int64_t milliseconds) {
  const int64_t seconds = std::max<int64_t>(0, milliseconds / 1000);
  if (seconds < 120) return fmt::format("{}s", seconds);
  if (seconds < 7200) return fmt::format("{}m", seconds / 60);
  if (seconds < 172800) return fmt::format("{}h", seconds / 3600);
  return fmt::format("{}d", seconds / 86400);
}

int ExitCode(const nlohmann::json& result) {
  const std::string kind = result.value("kind", "");
  if (kind == "exited") return result.value("exit_code", 0) & 255;
  if (kind == "signaled") return kExitSignalBase + (result.value("signal", 0) & 127);
  if (kind == "timeout") return kExitTimeout;
  if (kind == "oom_killed") return kExitSignalBase + 9;
  if (kind == "killed") return kExitCancelled;
  if (kind == "spawn_error") {
    const bool missing =
        result.value("step", "") == "exec" && result.value("errno_name", "") == "ENOENT";
    return missing ? kExitNotFound : kExitCannotRun;
  }
  return kExitPlatform;
}

std::string Explain(const nlohmann::json& result) {
  const std::string kind = result.value("kind", "");
  if (kind == "exited") return "";
  if (kind == "signaled") return fmt::format("ended by signal {}", result.value("signal", 0));
  if (kind == "timeout") {
    return fmt::format("time limit of {} ms reached; the whole process tree was killed",
                       result.value("limit", uint64_t{0}));
  }
  if (kind == "oom_killed") {
    return fmt::format("memory limit of {} reached", ShowSize(result.value("limit", uint64_t{0})));
  }
  if (kind == "spawn_error") {
    return fmt::format("cannot start: {}: {}", result.value("step", "?"),
                       result.value("message", result.value("errno_name", "?")));
  }
  if (kind == "killed") return fmt::format("ended: {}", result.value("killed_by", "?"));
  if (kind == "sandbox_ended") {
    return fmt::format("the sandbox ended: {}", result.value("killed_by", "?"));
  }
  return fmt::format("unknown end {}", kind);
}

Result<std::map<std::string, std::string>> ParseLabels(const std::vector<std::string>& words) {
  std::map<std::string, std::string> labels;
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos) {
      return Error(Code::kInvalidArgument, "cli.value",
                   fmt::format("--label: {} is not KEY=VALUE", word));
    }
    labels[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return labels;
}

void PrintJson(const nlohmann::json& value) {
  std::puts(value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void PrintWarnings(const std::vector<std::string>& warnings, uint64_t count) {
  for (const std::string& warning : warnings) {
    std::fprintf(stderr, "dsec: warning: %s\n", warning.c_str());
  }
  if (count > warnings.size()) {
    std::fprintf(stderr, "dsec: warning: and %llu more\n",
                 static_cast<unsigned long long>(count - warnings.size()));
  }
}

}  // namespace dsec::cli
