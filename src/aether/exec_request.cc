// SPDX-License-Identifier: Apache-2.0
#include "aether/exec_request.h"

#include <map>
#include <string_view>

#include "base/id.h"
#include "spawn/agent_abi.h"

namespace dsec::aether {
namespace {

Error Invalid(std::string field, std::string message) {
  return Error(Code::kInvalidArgument, "exec.invalid", std::move(message))
      .WithField(std::move(field));
}

Error TooLong(std::string field, size_t size, size_t limit) {
  return Error(Code::kInvalidArgument, "exec.too_long",
               fmt::format("{} takes {} bytes; the limit is {}", field, size, limit))
      .WithField(field);
}

bool HasNul(std::string_view text) { return text.find('\0') != std::string_view::npos; }

// The bad byte is not echoed: a value may be a secret, and a key may hold anything.
template <typename Env>
Result<void> CheckEnv(const Env& env) {
  int index = 0;
  for (const v1::KeyValue& pair : env) {
    std::string field = fmt::format("env[{}]", index++);
    if (pair.key().empty()) return Invalid(field, "an environment key must not be empty");
    if (pair.key().find_first_of(std::string_view("=\n\0", 3)) != std::string::npos) {
      return Invalid(field, "an environment key must not hold '=', newline or NUL");
    }
    if (HasNul(pair.value())) return Invalid(field, "an environment value must not hold NUL");
    size_t size = pair.key().size() + 1 + pair.value().size();
    if (size > kMaxArgBytes) return TooLong(field, size, kMaxArgBytes);
  }
  return Ok();
}

// As the kernel counts: each string with its NUL and a pointer to it.
size_t Counted(size_t size) { return size + 1 + sizeof(void*); }

template <typename Env>
size_t CountedEnv(const Env& env) {
  size_t total = 0;
  for (const v1::KeyValue& pair : env) {
    total += Counted(pair.key().size() + 1 + pair.value().size());
  }
  return total;
}

Result<void> CheckArgv(const v1::ExecRequest& request) {
  for (int i = 0; i < request.argv_size(); ++i) {
    std::string field = fmt::format("argv[{}]", i);
    if (HasNul(request.argv(i))) return Invalid(field, "an argument must not hold NUL");
    if (request.argv(i).size() > kMaxArgBytes) {
      return TooLong(field, request.argv(i).size(), kMaxArgBytes);
    }
  }
  if (request.argv_size() > 0 && request.argv(0).empty()) {
    return Invalid("argv[0]", "the program's name must not be empty");
  }
  return Ok();
}

Result<void> CheckPath(std::string_view path, std::string field) {
  if (HasNul(path) || path.size() >= 4096 || !path.starts_with('/')) {
    return Invalid(std::move(field),
                   "must be an absolute path of less than 4096 bytes without NUL");
  }
  return Ok();
}

}  // namespace

Result<ExecDefaults> DefaultsFrom(const v1::HelloRequest& hello) {
  ExecDefaults defaults;
  DSEC_TRY_VOID(CheckEnv(hello.env()));
  defaults.env.assign(hello.env().begin(), hello.env().end());
  if (!hello.workdir().empty()) {
    DSEC_TRY_VOID(CheckPath(hello.workdir(), "workdir"));
    defaults.workdir = hello.workdir();
  }
  defaults.user = hello.user();
  if (hello.output_bytes() > 0) defaults.output_bytes = hello.output_bytes();
  if (defaults.output_bytes > kMaxOutputBytes) {
    return Invalid("output_bytes", fmt::format("must be at most {}", kMaxOutputBytes));
  }
  defaults.open_files = hello.open_files();
  defaults.memory_limit_bytes = hello.memory_limit_bytes();
  return defaults;
}

Result<void> CheckExecRequest(const v1::ExecRequest& request, const ExecDefaults& defaults) {
  DSEC_TRY_VOID(ParseOpId(request.op_id(), "op_id"));
  if (request.has_script() == (request.argv_size() > 0)) {
    return Invalid("argv", "exactly one of argv and script must be given");
  }
  DSEC_TRY_VOID(CheckArgv(request));
  DSEC_TRY_VOID(CheckEnv(request.env()));
  if (!request.cwd().empty()) DSEC_TRY_VOID(CheckPath(request.cwd(), "cwd"));
  if (!request.shell().empty()) DSEC_TRY_VOID(CheckPath(request.shell(), "shell"));
  if (request.output_bytes() > kMaxOutputBytes) {
    return Invalid("output_bytes", fmt::format("must be at most {}", kMaxOutputBytes));
  }
  if (request.timeout_ms() > kMaxTimeoutMs) {
    return Invalid("timeout_ms", fmt::format("must be at most {}", kMaxTimeoutMs));
  }
  if (request.has_tty() && (request.tty().rows() > 65535 || request.tty().cols() > 65535)) {
    return Invalid("tty", "rows and cols must be at most 65535");
  }
  if (!request.session().empty()) {
    DSEC_TRY_VOID(ParseOpId(request.session(), "session"));
    if (request.has_tty())
      return Invalid("tty", "a command of a session has no terminal of its own");
    if (request.group_kill()) {
      return Invalid("group_kill", "a command of a session shares its shell with others");
    }
  }
  size_t total = CountedEnv(defaults.env) + CountedEnv(request.env());
  for (const std::string& argument : request.argv()) total += Counted(argument.size());
  if (total > kMaxArgsTotal) return TooLong("argv and env", total, kMaxArgsTotal);
  if (static_cast<size_t>(request.argv_size()) > spawn::abi::kMaxStrings ||
      request.env().size() + defaults.env.size() + 8 > spawn::abi::kMaxStrings) {
    return TooLong("argv and env", spawn::abi::kMaxStrings + 1, spawn::abi::kMaxStrings);
  }
  return Ok();
}

std::vector<std::string> BuildEnvironment(const v1::ExecRequest& request,
                                          const ExecDefaults& defaults, const Identity& identity) {
  std::map<std::string_view, std::string_view> merged;
  merged["PATH"] = spawn::abi::kDefaultPath;
  merged["HOME"] = identity.home;
  if (!identity.name.empty()) merged["USER"] = identity.name;
  if (request.has_tty()) merged["TERM"] = "xterm-256color";
  for (const v1::KeyValue& pair : defaults.env) merged[pair.key()] = pair.value();
  for (const v1::KeyValue& pair : request.env()) merged[pair.key()] = pair.value();
  std::vector<std::string> environment;
  environment.reserve(merged.size());
  for (const auto& [key, value] : merged) {
    std::string& text = environment.emplace_back();
    text.reserve(key.size() + 1 + value.size());
    text.append(key).append(1, '=').append(value);
  }
  return environment;
}

}  // namespace dsec::aether
