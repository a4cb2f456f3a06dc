// SPDX-License-Identifier: Apache-2.0
// exec, shell, logs: one thread reads the command's stream, a second one sends input, window sizes
// and signals.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/clock.h"
#include "base/id.h"
#include "cli/commands.h"
#include "cli/output.h"
#include "http/base64.h"
#include "http/target.h"
#include "os/file.h"
#include "os/unique_fd.h"

namespace dsec::cli {
namespace {

using http::PercentEncode;
using nlohmann::json;

// The terminal in raw mode; put back by the destructor.
class RawTerminal {
 public:
  explicit RawTerminal(bool wanted) {
    if (!wanted || isatty(STDIN_FILENO) == 0 || tcgetattr(STDIN_FILENO, &before_) != 0) return;
    termios raw = before_;
    cfmakeraw(&raw);
    active_ = tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
  }
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;
  ~RawTerminal() {
    if (active_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }

 private:
  termios before_{};
  bool active_ = false;
};

json WindowSize() {
  winsize size{};
  if (ioctl(STDIN_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0) {
    size.ws_row = 24;
    size.ws_col = 80;
  }
  return {{"rows", size.ws_row}, {"cols", size.ws_col}};
}

// SIGINT, SIGTERM, SIGHUP and SIGWINCH come to a descriptor while this lives.
class SignalDescriptor {
 public:
  SignalDescriptor() {
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) sigaddset(&wanted, number);
    pthread_sigmask(SIG_BLOCK, &wanted, &before_);
    fd_ = os::UniqueFd(signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  SignalDescriptor(const SignalDescriptor&) = delete;
  SignalDescriptor& operator=(const SignalDescriptor&) = delete;
  ~SignalDescriptor() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  int get() const { return fd_.get(); }

 private:
  sigset_t before_{};
  os::UniqueFd fd_;
};

// Sends what the user does to the command: input, resizes, interrupts. Runs on a thread of its own
// with its own connection, since each call waits for its reply while the other connection streams.
class Control {
 public:
  Control(Endpoint endpoint, std::string base, bool input, bool tty)
      : api_(std::move(endpoint)),
        base_(std::move(base)),
        input_(input),
        tty_(tty),
        done_(eventfd(0, EFD_CLOEXEC)),
        thread_([this] { Loop(); }) {}
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;
  ~Control() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(done_.get(), &one, sizeof one);
    thread_.join();
  }

 private:
  void Loop() {
    for (;;) {
      pollfd fds[] = {{done_.get(), POLLIN, 0},
                      {signals_.get(), POLLIN, 0},
                      {input_ ? STDIN_FILENO : -1, POLLIN, 0}};
      if (poll(fds, 3, -1) < 0) {
        if (errno == EINTR) continue;
        return;
      }
      if (fds[0].revents != 0) return;
      if (fds[1].revents != 0) OnSignal();
      if (fds[2].revents != 0) OnInput();
    }
  }

  void OnSignal() {
    signalfd_siginfo info{};
    if (read(signals_.get(), &info, sizeof info) != sizeof info) return;
    if (info.ssi_signo == SIGWINCH) {
      if (tty_) [[maybe_unused]]
        const auto resized = api_.Call("POST", base_ + "/resize", WindowSize().dump());
      return;
    }
    [[maybe_unused]] const auto cancelled =
        api_.Call("POST", base_ + "/cancel", R"({"grace_ms":1000})");
  }

  void OnInput() {
    std::string data(size_t{1} << 16, '\0');
    const ssize_t got = read(STDIN_FILENO, data.data(), data.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
    data.resize(got > 0 ? static_cast<size_t>(got) : 0);
    const bool eof = data.empty();
    size_t sent = 0;
    do {
      auto reply = api_.Send(
          "POST", fmt::format("{}/stdin?offset={}{}", base_, offset_, eof ? "&eof=true" : ""),
          std::string_view(data).substr(sent));
      const json taken = reply.ok() ? json::parse(reply->body, nullptr, false) : json();
      if (!taken.is_object() || taken.value("closed", false)) {
        input_ = false;  // nobody reads any more; the end of the command will say the rest
        return;
      }
      const uint64_t accepted = taken.value("accepted", offset_);
      sent += static_cast<size_t>(accepted - offset_);
      offset_ = accepted;
    } while (sent < data.size());
    if (eof) input_ = false;
  }

  Connection api_;
  std::string base_;
  bool input_;
  const bool tty_;
  uint64_t offset_ = 0;
  SignalDescriptor signals_;
  os::UniqueFd done_;
  std::thread thread_;
};

// Writes the records of an exec stream to stdout and stderr.
class Printer {
 public:
  // False when our own output is closed: nobody reads.
  bool OnLine(std::string_view line) {
    const json record = json::parse(line, nullptr, false);
    if (!record.is_object()) return true;
    const std::string type = record.value("type", "");
    if (type == "stdout" || type == "stderr") {
      const auto data = http::DecodeBase64(record.value("data_b64", ""));
      if (!data.has_value()) return true;
      if (const uint64_t skipped = record.value("skipped", uint64_t{0}); skipped > 0) {
        std::fprintf(stderr, "dsec: %llu bytes of %s were dropped here\n",
                     static_cast<unsigned long long>(skipped), type.c_str());
      }
      return os::WriteAll(type == "stdout" ? STDOUT_FILENO : STDERR_FILENO, *data).ok();
    }
    if (type == "started") started_ = true;
    if (type == "exit") result_ = record.value("result", json::object());
    if (type == "error") error_ = record.value("error", json::object()).value("message", "");
    return true;
  }
  bool started() const { return started_; }
  // Prints how it ended when that was no exit code.
  int Finish() const {
    if (!error_.empty()) {
      std::fprintf(stderr, "dsec: %s\n", error_.c_str());
      return kExitPlatform;
    }
    if (result_.is_null()) {
      std::fprintf(stderr, "dsec: the stream ended before the command\n");
      return kExitPlatform;
    }
    if (const std::string text = Explain(result_); !text.empty()) {
      std::fprintf(stderr, "dsec: %s\n", text.c_str());
    }
    return ExitCode(result_);
  }

 private:
  bool started_ = false;
  json result_;
  std::string error_;
};

void Logs(Context& context, const std::string& sandbox, const std::string& op, bool follow) {
  auto api = context.Open();
  if (!api) return;
  const std::string base = "/v1/sandboxes/" + PercentEncode(sandbox) + "/exec/" + PercentEncode(op);
  Printer printer;
  auto done = api->Stream(
      "GET", base + "/stream?stdout_offset=0&stderr_offset=0" + (follow ? "" : "&follow=false"), "",
      [&](std::string_view line) { return printer.OnLine(line); });
  if (!done.ok()) return context.Fail(done.error());
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
  Printer printer;
  Result<void> done;
  {
    const RawTerminal terminal(flags.tty && flags.stdin_open);
    // Input can only be sent to a command that exists: the control thread starts with it.
    std::unique_ptr<Control> control;
    done = api.Stream("POST", target, text(), [&](std::string_view line) {
      const bool goes_on = printer.OnLine(line);
      if (printer.started() && !control) {
        control = std::make_unique<Control>(*endpoint, target + "/" + PercentEncode(op),
                                            flags.stdin_open, flags.tty);
      }
      return goes_on;
    });
  }
  if (!done.ok()) return Fail(done.error());
  return printer.Finish();
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
