// SPDX-License-Identifier: Apache-2.0
// exec, shell, logs.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/id.h"
#include "cli/commands.h"
#include "cli/exec_session.h"
#include "cli/output.h"
#include "http/target.h"

namespace dsec::cli {
namespace {

using http::PercentEncode;
using nlohmann::json;

void Logs(Context& context, const std::string& sandbox, const std::string& op, bool follow) {
  auto api = context.Open();
  if (!api) return;
  const std::string base = "/v1/sandboxes/" + PercentEncode(sandbox) + "/exec/" + PercentEncode(op);
  Printer printer(context.json);
  auto done = api->Stream(
      "GET", base + "/stream?stdout_offset=0&stderr_offset=0" + (follow ? "" : "&follow=false"), "",
      [&](std::string_view line) { return printer.OnLine(line); });
  if (!done.ok()) return context.Fail(done.error());
  if (printer.output_closed()) return;
  if (follow) context.exit_code = printer.Finish();
}

}  // namespace

void ExecFlags::AddTo(CLI::App& app) {
  app.add_option("command", command, "Program and arguments, after --");
  app.add_flag("-i,--interactive", stdin_open, "Send this process's standard input");
  app.add_flag("-t,--tty", tty, "Run on a terminal");
  app.add_flag("-d,--detach", detach, "Start and print the op_id");
  app.add_flag("--merged", merged, "stderr into stdout, in exact order");
  app.add_option("--timeout", timeout, "Time limit, e.g. 30 or 5m");
  app.add_option("--cwd,-w", cwd, "Working folder");
  app.add_option("--env,-e", env, "KEY=VALUE; repeat");
  app.add_option("--user,-u", user, "User");
}

int RunExec(Context& context, Connection& api, const std::string& sandbox, const ExecFlags& flags) {
  const std::string op = "cli-" + NewUlid(Clock::System());
  const std::string target = "/v1/sandboxes/" + PercentEncode(sandbox) + "/exec";
  json body = {{"op_id", op}, {"argv", flags.command}};
  if (!flags.timeout.empty()) {
    auto millis = ParseMillis(flags.timeout, "--timeout");
    if (!millis.ok()) return Fail(millis.error());
    body["timeout_ms"] = *millis;
  }
  if (!flags.cwd.empty()) body["cwd"] = flags.cwd;
  if (!flags.user.empty()) body["user"] = flags.user;
  for (const std::string& word : flags.env) {
    const size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos) {
      return Fail(Error(Code::kInvalidArgument, "cli.value",
                        fmt::format("--env: {} is not KEY=VALUE", word)));
    }
    body["env"][word.substr(0, equals)] = word.substr(equals + 1);
  }
  if (flags.stdin_open) body["stdin_open"] = true;
  if (flags.merged) body["merged"] = true;
  if (flags.tty) {
    body["tty"] = WindowSize();
    if (const char* term = std::getenv("TERM"); term != nullptr && !body["env"].contains("TERM")) {
      body["env"]["TERM"] = term;
    }
  }
  const auto text = [&body] { return body.dump(-1, ' ', false, json::error_handler_t::replace); };
  if (flags.detach) {
    body["detached"] = true;
    auto reply = api.Call("POST", target, text());
    if (!reply.ok()) return Fail(reply.error());
    std::puts(context.json ? reply->body.c_str() : op.c_str());
    return 0;
  }
  auto endpoint = FindEndpoint(context.url, context.key);
  if (!endpoint.ok()) return Fail(endpoint.error());
  return RunSession(api, {.endpoint = *endpoint,
                          .exec_url = target,
                          .op_id = op,
                          .body = text(),
                          .input = flags.stdin_open,
                          .tty = flags.tty,
                          .as_json = context.json});
}

void AddExecCommands(CLI::App& app, Context& context) {
  auto id = std::make_shared<std::string>();
  auto flags = std::make_shared<ExecFlags>();
  auto* exec = app.add_subcommand("exec", "Run a command in a sandbox");
  exec->add_option("id", *id, "Sandbox")->required();
  flags->AddTo(*exec);
  exec->callback([&context, id, flags] {
    if (flags->command.empty()) {
      return context.Fail(Error(Code::kInvalidArgument, "cli.value",
                                "no command; write: dsec exec ID -- PROGRAM ARGS"));
    }
    auto api = context.Open();
    if (api) context.exit_code = RunExec(context, *api, *id, *flags);
  });

  auto shell_flags = std::make_shared<ExecFlags>();
  auto* shell = app.add_subcommand("shell", "Open a terminal in a sandbox");
  shell->add_option("id", *id, "Sandbox")->required();
  shell->add_option("command", shell_flags->command,
                    "Program and arguments instead of a login shell");
  shell->add_option("--user,-u", shell_flags->user, "User");
  shell->callback([&context, id, shell_flags] {
    shell_flags->stdin_open = true;
    shell_flags->tty = true;
    if (shell_flags->command.empty()) shell_flags->command = {"/bin/sh", "-l"};
    auto api = context.Open();
    if (api) context.exit_code = RunExec(context, *api, *id, *shell_flags);
  });

  auto op = std::make_shared<std::string>();
  auto follow = std::make_shared<bool>(false);
  auto* logs = app.add_subcommand("logs", "Output of a command that was started with --detach");
  logs->add_option("id", *id, "Sandbox")->required();
  logs->add_option("op_id", *op, "Command")->required();
  logs->add_flag("--follow,-f", *follow, "Until the command ends");
  logs->callback([&context, id, op, follow] { Logs(context, *id, *op, *follow); });
}

}  // namespace dsec::cli
