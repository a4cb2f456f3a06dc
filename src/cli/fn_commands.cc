// SPDX-License-Identifier: Apache-2.0
// fn run, types, pools.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/id.h"
#include "base/utf8.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "http/base64.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

struct FnFlags {
  std::string file, type, input;
  std::vector<std::string> limits, compile_limits, env, args;
  bool quiet = false;
};

Error BadValue(std::string_view flag, std::string_view text, std::string_view rule) {
  return Error(Code::kInvalidArgument, "cli.value",
               fmt::format("{}: {} is not {}", flag, text, rule));
}

std::string TypeOf(const std::string& file) {
  static constexpr std::pair<std::string_view, std::string_view> kTypes[] = {
      {".c", "c"},       {".cc", "cpp"},        {".cpp", "cpp"},   {".cxx", "cpp"},
      {".py", "python"}, {".go", "go"},         {".java", "java"}, {".js", "javascript"},
      {".sh", "bash"},   {".cjs", "javascript"}};
  for (const auto& [extension, type] : kTypes) {
    if (file.ends_with(extension)) return std::string(type);
  }
  return {};
}

// "-" is standard input.
Result<std::string> ReadAll(const std::string& path) {
  if (path == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file.good() && !file.eof())
    return Error::FromErrno(errno, "cli.file", fmt::format("cannot read {}", path));
  return text;
}

Result<uint64_t> ParseCount(std::string_view text, std::string_view flag) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size())
    return BadValue(flag, text, "a whole number");
  return value;
}

// "memory=256m" and so on, as the API's limits.
Result<json> Limits(const std::vector<std::string>& words, std::string_view flag) {
  using Parse = Result<uint64_t> (*)(std::string_view, std::string_view);
  struct Limit {
    std::string_view word, key;
    Parse parse;
  };
  static constexpr Limit kLimits[] = {
      {"wall", "wall_ms", ParseMillis},      {"cpu", "cpu_ms", ParseMillis},
      {"memory", "memory_bytes", ParseSize}, {"processes", "processes", ParseCount},
      {"output", "output_bytes", ParseSize}, {"file", "file_bytes", ParseSize},
      {"disk", "disk_bytes", ParseSize},     {"inodes", "disk_inodes", ParseCount}};
  json out = json::object();
  for (const std::string& word : words) {
    const size_t equals = word.find('=');
    const auto* const found =
        std::find_if(std::begin(kLimits), std::end(kLimits),
                     [&](const Limit& limit) { return limit.word == word.substr(0, equals); });
    if (equals == std::string::npos || found == std::end(kLimits)) {
      return BadValue(
          flag, word,
          "LIMIT=VALUE with wall, cpu, memory, processes, output, file, disk or inodes");
    }
    DSEC_TRY(out[std::string(found->key)], found->parse(word.substr(equals + 1), flag));
  }
  return out;
}

void PutBytes(json& body, const std::string& key, const std::string& bytes) {
  if (IsUtf8(bytes)) {
    body[key] = bytes;
    return;
  }
  std::string encoded;
  http::AppendBase64(bytes, encoded);
  body[key + "_b64"] = std::move(encoded);
}

Result<json> Body(const FnFlags& flags) {
  const std::string type = flags.type.empty() ? TypeOf(flags.file) : flags.type;
  json body = {{"op_id", "cli-" + NewUlid(Clock::System())}, {"type", type}, {"args", flags.args}};
  if (type.empty()) {
    return Error(Code::kInvalidArgument, "cli.value",
                 fmt::format("--type: {} has no known extension; say the type", flags.file));
  }
  DSEC_TRY(const std::string code, ReadAll(flags.file));
  PutBytes(body, "code", code);
  if (!flags.input.empty()) {
    DSEC_TRY(const std::string input, ReadAll(flags.input));
    PutBytes(body, "stdin", input);
  }
  DSEC_TRY(body["limits"], Limits(flags.limits, "--limit"));
  DSEC_TRY(body["compile_limits"], Limits(flags.compile_limits, "--compile-limit"));
  for (const std::string& word : flags.env) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos) return BadValue("--env", word, "KEY=VALUE");
    body["env"][word.substr(0, equals)] = word.substr(equals + 1);
  }
  return body;
}

std::string Bytes(const json& output) {
  const auto encoded = output.find("data_b64");
  if (encoded == output.end()) return output.value("data", "");
  return http::DecodeBase64(encoded->get_ref<const std::string&>()).value_or("");
}

void PassOn(const json& step) {
  for (const auto& [key, stream] : {std::pair{"stdout", stdout}, {"stderr", stderr}}) {
    const json output = step.value(key, json::object());
    const std::string data = Bytes(output);
    std::fwrite(data.data(), 1, data.size(), stream);
    std::fflush(stream);
    const uint64_t total = output.value("total", uint64_t{0});
    if (total > data.size()) {
      std::fprintf(stderr, "dsec: %llu bytes of %s are left out\n",
                   static_cast<unsigned long long>(total - data.size()), key);
    }
  }
}

void Run(Context& context, const FnFlags& flags) {
  auto body = Body(flags);
  if (!body.ok()) return context.Fail(body.error());
  auto api = context.Open();
  if (!api) return;
  auto reply =
      api->Call("POST", "/v1/fn/call", body->dump(-1, ' ', false, json::error_handler_t::replace));
  if (!reply.ok()) return context.Fail(reply.error());
  const json result = json::parse(reply->body);
  context.exit_code = FnExitCode(result);
  if (context.json) {
    std::puts(reply->body.c_str());
    return;
  }
  for (const char* step : {"compile", "run"}) {
    if (result.contains(step)) PassOn(result[step]);
  }
  if (!flags.quiet) std::fprintf(stderr, "dsec: %s\n", FnExplain(result).c_str());
}

std::string Joined(const json& words) {
  return fmt::format("{}", fmt::join(words.get<std::vector<std::string>>(), " "));
}

// GET of one list; its table unless --json.
template <typename Row>
void ShowList(Context& context, const std::string& target, const char* list,
              const std::vector<std::string>& header, const Row& row) {
  auto api = context.Open();
  if (!api) return;
  auto reply = api->Call("GET", target);
  if (!reply.ok()) return context.Fail(reply.error());
  if (context.json) {
    std::puts(reply->body.c_str());
    return;
  }
  std::vector<std::vector<std::string>> rows;
  const json body = json::parse(reply->body);
  for (const json& item : body.at(list)) rows.push_back(row(item));
  std::fputs(Table(header, rows).c_str(), stdout);
}

void ShowTypes(Context& context) {
  ShowList(context, "/v1/fn/types", "types", {"NAME", "ALIASES", "SOURCE", "BASE", "DESCRIPTION"},
           [](const json& type) -> std::vector<std::string> {
             return {type.value("name", ""), Joined(type.value("aliases", json::array())),
                     type.value("source", ""),
                     type.value("environment", json::object()).value("base", ""),
                     type.value("description", "")};
           });
}

void ShowPools(Context& context) {
  ShowList(
      context, "/v1/fn/pools", "pools",
      {"BASE", "WARM", "WORKERS", "IDLE", "QUEUED", "MIN", "MAX", "CALLS", "REPLACED", "KEY"},
      [](const json& pool) {
        std::vector<std::string> row = {pool.value("environment", json::object()).value("base", ""),
                                        pool.value("warm", "")};
        for (const char* key : {"workers", "idle", "queued", "min", "max", "calls", "replaced"})
          row.push_back(std::to_string(pool.value(key, uint64_t{0})));
        row.push_back(pool.value("key", "").substr(0, 19));
        return row;
      });
}

}  // namespace

int FnExitCode(const json& result) {
  const std::string verdict = result.value("verdict", "");
  const json step = result.value("run", json::object());
  if (verdict == "OK" || verdict == "WRONG_EXIT") return step.value("exit_code", 0);
  if (verdict == "SIGNALED") return kExitSignalBase + step.value("signal", 0);
  if (verdict == "TIME_LIMIT") return kExitTimeout;
  if (verdict == "COMPILE_ERROR") return kExitCannotRun;
  if (verdict.ends_with("_LIMIT")) return kExitSignalBase + SIGKILL;
  return kExitPlatform;
}

std::string FnExplain(const json& result) {
  const std::string verdict = result.value("verdict", "?");
  if (verdict == "INFRASTRUCTURE") {
    return fmt::format("{}: {}: {}", verdict, result.value("reason", ""),
                       result.value("message", ""));
  }
  const json& step = result.contains("run")       ? result["run"]
                     : result.contains("compile") ? result["compile"]
                                                  : json::object();
  std::string out = verdict;
  if (step.contains("limit")) out += fmt::format(" ({})", step.value("limit", ""));
  if (step.contains("signal")) out += fmt::format(" signal {}", step.value("signal", 0));
  if (step.contains("exit_code")) out += fmt::format(" exit {}", step.value("exit_code", 0));
  const auto millis = [&](const char* key) {
    return static_cast<double>(step.value(key, uint64_t{0})) / 1000;
  };
  return fmt::format("{}, {:.1f} ms, cpu {:.1f} ms, {}", out, millis("wall_usec"),
                     millis("cpu_usec"), ShowSize(step.value("memory_peak_bytes", uint64_t{0})));
}

void AddFnCommands(CLI::App& app, Context& context) {
  auto* fn = app.add_subcommand("fn", "Stateless calls: run a program in a container that exists");
  fn->require_subcommand(1);
  auto flags = std::make_shared<FnFlags>();
  auto* run = fn->add_subcommand("run", "Compile and run one file; its exit code is passed on");
  run->add_option("file", flags->file, "Source, or - for standard input")->required();
  run->add_option("args", flags->args, "Arguments of the program, after --");
  run->add_option("--type", flags->type, "Task type (by the extension)");
  run->add_option("--stdin", flags->input, "File for its standard input, or -");
  run->add_option("--limit,-l", flags->limits, "LIMIT=VALUE, e.g. wall=2s or memory=256m; repeat")
      ->allow_extra_args(false);
  run->add_option("--compile-limit", flags->compile_limits, "The same of the compile step")
      ->allow_extra_args(false);
  run->add_option("--env,-e", flags->env, "KEY=VALUE; repeat")->allow_extra_args(false);
  run->add_flag("--quiet,-q", flags->quiet, "No line with the verdict on standard error");
  run->callback([&context, flags] { Run(context, *flags); });
  fn->add_subcommand("types", "Task types")->callback([&context] { ShowTypes(context); });
  fn->add_subcommand("pools", "Pools of workers")->callback([&context] { ShowPools(context); });
}

}  // namespace dsec::cli
