// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <CLI/App.hpp>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/result.h"
#include "config/node_config.h"
#include "os/unique_fd.h"

// What the main programs of the daemons share.
namespace dsec::up {

inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// Prints the error; returns the exit code.
int Fail(const Error& error);

// The flags by which a configuration is chosen. Each but --config overrides one key.
class ConfigFlags {
 public:
  struct Override {
    const char* flag;
    std::string config::NodeConfig::* key;
  };
  explicit ConfigFlags(std::vector<Override> overrides)
      : overrides_(std::move(overrides)), values_(overrides_.size()) {}
  // `app` keeps addresses into this object.
  void AddTo(CLI::App& app);
  Result<config::NodeConfig> Load() const;

 private:
  std::string file_;
  std::vector<Override> overrides_;
  std::vector<std::string> values_;
};

// One daemon as a command.
struct Daemon {
  const char* command;  // "dsec up"
  const char* description;
  bool needs_root = true;
  std::vector<ConfigFlags::Override> overrides;
  // Flags of its own.
  std::function<void(CLI::App&)> add_flags;
  // Runs until a signal can be read from the descriptor.
  std::function<Result<void>(const config::NodeConfig&, int signals)> serve;
};
// Parses, checks, prints what was asked for, or serves. Returns the exit code.
int RunDaemon(const Daemon& daemon, int argc, char** argv);

// How long the graceful end of a daemon may take. When it is over the process ends at once, as if
// killed, which all of it is made for; the log says at which step. kExitFailure then.
class StopLimit {
 public:
  explicit StopLimit(std::chrono::milliseconds limit);
  // In time.
  ~StopLimit();
  StopLimit(const StopLimit&) = delete;
  StopLimit& operator=(const StopLimit&) = delete;
  // What begins now; a literal. Any thread.
  void Step(const char* name) { step_ = name; }

 private:
  void Run(std::chrono::milliseconds limit);

  std::atomic<const char*> step_ = "begin";
  std::mutex mutex_;
  std::condition_variable ended_;
  bool done_ = false;
  std::thread thread_;
};
// What the parts have of bounds of their own comes to less.
inline constexpr std::chrono::seconds kStopTime{60};

// Waits for a signal on the descriptor and logs it.
void AwaitSignal(int signals);

}  // namespace dsec::up
