// SPDX-License-Identifier: Apache-2.0
#include "up/process.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>

#include "base/fault.h"
#include "base/log.h"
#include "up/node.h"

namespace dsec::up {

int Fail(const Error& error) {
  std::fprintf(stderr, "dsec: %s\n", error.ToString().c_str());
  return kExitFailure;
}

void ConfigFlags::AddTo(CLI::App& app) {
  app.add_option("--config", file_, "TOML file; docs/config.md lists the keys");
  for (size_t i = 0; i < overrides_.size(); ++i) {
    std::string key = overrides_[i].flag + 2;
    app.add_option(overrides_[i].flag, values_[i], "Overrides the key of that name");
  }
}

Result<config::NodeConfig> ConfigFlags::Load() const {
  config::NodeConfig config;
  if (!file_.empty()) {
    DSEC_TRY(config, config::LoadNodeConfig(file_));
  }
  for (size_t i = 0; i < overrides_.size(); ++i) {
    if (!values_[i].empty()) config.*overrides_[i].key = values_[i];
  }
  DSEC_TRY_VOID(config::CheckNodeConfig(config));
  return config;
}

int RunDaemon(const Daemon& daemon, int argc, char** argv) {
  CLI::App app(daemon.description, daemon.command);
  ConfigFlags flags(daemon.overrides);
  flags.AddTo(app);
  bool check = false;
  bool dump = false;
  bool reference = false;
  app.add_flag("--check-config", check, "Only check the settings");
  app.add_flag("--dump-config", dump, "Print the settings that hold");
  app.add_flag("--config-reference", reference, "Print docs/config.md");
  if (daemon.add_flags) daemon.add_flags(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  if (reference) {
    std::fputs(config::NodeConfigReference().c_str(), stdout);
    return 0;
  }
  auto config = flags.Load();
  if (!config.ok()) return Fail(config.error());
  if (dump) std::fputs(config::DumpNodeConfig(*config).c_str(), stdout);
  if (check || dump) return 0;
  if (daemon.needs_root && geteuid() != 0) {
    return Fail(
        Error(Code::kPermissionDenied, "node.root",
              fmt::format("{} needs root: namespaces, mounts and cgroups", daemon.command)));
  }
  log::Configure(LogOptionsOf(*config));
  // Before any thread exists, so that all inherit the mask and only the descriptor sees the
  // signals.
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&wanted, number);
  pthread_sigmask(SIG_BLOCK, &wanted, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  const os::UniqueFd signals(signalfd(-1, &wanted, SFD_CLOEXEC));
  if (auto armed = fault::ArmFromEnv(); !armed.ok()) return Fail(armed.error());
  auto done = daemon.serve(*config, signals.get());
  return done.ok() ? 0 : Fail(done.error());
}

StopLimit::StopLimit(std::chrono::milliseconds limit) : thread_([this, limit] { Run(limit); }) {}

StopLimit::~StopLimit() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  ended_.notify_all();
  thread_.join();
}

void StopLimit::Run(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  if (ended_.wait_for(lock, limit, [this] { return done_; })) return;
  log::Error("node.stop_stuck", {{"step", step_.load()}, {"after_ms", limit.count()}});
  std::_Exit(kExitFailure);
}

void AwaitSignal(int signals) {
  signalfd_siginfo info{};
  while (read(signals, &info, sizeof info) != sizeof info) {
  }
  log::Info("node.stopping", {{"signal", info.ssi_signo}});
}

}  // namespace dsec::up
