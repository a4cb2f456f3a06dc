// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <thread>

#include "cli/connection.h"
#include "os/unique_fd.h"

namespace dsec::cli {

// Blocks SIGINT, SIGTERM, SIGHUP and SIGWINCH in this thread and those it starts, until destroyed.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_{};
};

// Hands each of those signals to a function, on a thread of its own, until destroyed. They must be
// blocked.
class SignalThread {
 public:
  explicit SignalThread(std::function<void(int)> on_signal);
  ~SignalThread();
  SignalThread(const SignalThread&) = delete;
  SignalThread& operator=(const SignalThread&) = delete;

 private:
  std::function<void(int)> on_signal_;
  os::UniqueFd signals_;
  os::UniqueFd stop_;
  std::thread thread_;
};

// Takes the records of an exec stream and writes them to stdout and stderr.
class Printer {
 public:
  explicit Printer(bool as_json) : as_json_(as_json) {}

  // False when nobody reads our own output any more.
  bool OnLine(std::string_view line);
  bool started() const { return started_; }
  // The last record has come.
  bool ended() const { return !result_.is_null() || !error_.empty() || more_; }
  bool output_closed() const { return output_closed_; }
  // Where to go on when the stream broke.
  uint64_t stdout_offset() const { return stdout_offset_; }
  uint64_t stderr_offset() const { return stderr_offset_; }
  // Says how the command ended when that was no exit code; the exit code for this process.
  int Finish() const;

 private:
  bool Output(const nlohmann::json& record, bool to_stdout);

  const bool as_json_;
  bool started_ = false;
  bool more_ = false;
  bool output_closed_ = false;
  uint64_t stdout_offset_ = 0;
  uint64_t stderr_offset_ = 0;
  nlohmann::json result_;
  std::string error_;
};

struct SessionOptions {
  Endpoint endpoint;
  std::string exec_url;  // /v1/sandboxes/ID/exec
  std::string op_id;
  std::string body;  // of the POST that starts the command
  bool input = false;
  bool tty = false;
  bool as_json = false;
};

// Runs one command attached: its output here, our input, window size and interrupts there. The
// first SIGINT, SIGTERM or SIGHUP cancels the command, the next one leaves at once; the terminal is
// as before in every case. A stream that breaks is taken up again for a minute, from the byte where
// it broke. Returns the exit code for this process.
int RunSession(Connection& api, const SessionOptions& options);

nlohmann::json WindowSize();

}  // namespace dsec::cli
