// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>
#include <functional>
#include <memory>
#include <string>

#include "cli/connection.h"

namespace dsec::cli {

// What every command gets: the global flags and the exit code that it leaves.
struct Context {
  std::string url;
  std::string key;
  bool json = false;
  int exit_code = 0;

  // Opens the API or prints why not (then null and exit_code is set).
  std::unique_ptr<Connection> Open();
  // Sets the exit code from a failed result.
  void Fail(const Error& error);
};

// Each adds its subcommands; the callbacks run after parsing.
void AddSandboxCommands(CLI::App& app,
                        Context& context);  // create run ps rm renew stats top events doctor
void AddExecCommands(CLI::App& app, Context& context);  // exec shell logs
void AddCopyCommand(CLI::App& app, Context& context);   // cp
void AddLayerCommands(CLI::App& app,
                      Context& context);  // layer build ls show verify du rm pack flatten compress
                                          // trace gc nodes forget
void AddDiskCommands(CLI::App& app, Context& context);  // disk import info collapse export verify
void AddIamCommands(CLI::App& app, Context& context);   // iam ...
void AddFnCommands(CLI::App& app, Context& context);    // fn run types pools

// Flags that describe a sandbox; shared by create and run.
struct CreateFlags {
  std::string base, backend, workspace, user, workdir, hostname, name, project, memory, disk, shm,
      ttl, idle, wait = "120";
  std::vector<std::string> toolkits, env, labels;
  double cpus = 0;
  bool record_first_touch = false;
  uint64_t pids = 0, inodes = 0, open_files = 0;
  void AddTo(CLI::App& command);
  // The body of a create request with a fresh request_id.
  Result<std::string> ToJson() const;
};

// Flags of one command inside; shared by exec and run.
struct ExecFlags {
  std::vector<std::string> command, env;
  std::string cwd, user, timeout;
  bool stdin_open = false, tty = false, detach = false, merged = false;
  void AddTo(CLI::App& command_app);
};

// Runs a command in a sandbox with this process's streams; returns the exit code to pass on.
int RunExec(Context& context, Connection& api, const std::string& sandbox, const ExecFlags& flags);

}  // namespace dsec::cli
