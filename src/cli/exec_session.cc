// SPDX-License-Identifier: Apache-2.0
// Threads of an attached command: the caller's reads the stream; one forwards signals; one forwards
// input. Each has a connection of its own, since each may have to wait for a reply.
#include "cli/exec_session.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <termios.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>

#include "base/clock.h"
#include "cli/output.h"
#include "http/base64.h"
#include "http/target.h"
#include "os/file.h"

namespace dsec::cli {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kReattachFor{60};
constexpr std::chrono::milliseconds kReattachPause{500};
constexpr size_t kInputPiece = size_t{256} << 10;
constexpr int kExitOutputClosed = kExitSignalBase + SIGPIPE;

sigset_t OurSignals() {
  sigset_t wanted;
  sigemptyset(&wanted);
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGWINCH}) sigaddset(&wanted, number);
  return wanted;
}

void Wake(const os::UniqueFd& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
}

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
    if (active_) tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
  }

 private:
  termios before_{};
  bool active_ = false;
};

// Sends our standard input to the command.
class InputThread {
 public:
  InputThread(Endpoint endpoint, std::string url)
      : api_(std::move(endpoint)),
        url_(std::move(url)),
        stop_(::eventfd(0, EFD_CLOEXEC)),
        thread_([this] { Loop(); }) {}
  InputThread(const InputThread&) = delete;
  InputThread& operator=(const InputThread&) = delete;
  ~InputThread() {
    Wake(stop_);
    api_.Abort();
    thread_.join();
  }

 private:
  void Loop() {
    std::string data;
    while (Wait(STDIN_FILENO, -1)) {
      data.resize(kInputPiece);
      const ssize_t got = ::read(STDIN_FILENO, data.data(), data.size());
      if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      data.resize(got > 0 ? static_cast<size_t>(got) : 0);
      if (!Send(data) || data.empty()) return;
    }
  }

  // Waits for `fd` (-1: only for the time); false when the command is over.
  bool Wait(int fd, int millis) {
    pollfd fds[] = {{stop_.get(), POLLIN, 0}, {fd, POLLIN, 0}};
    while (::poll(fds, 2, millis) < 0 && errno == EINTR) {
    }
    return fds[0].revents == 0;
  }

  // False when nobody reads any more; the end of the command will say why. No data: end of file.
  bool Send(std::string_view data) {
    const uint64_t end = offset_ + data.size();
    const bool eof = data.empty();
    while (true) {
      auto reply = api_.Send(
          "POST", fmt::format("{}/stdin?offset={}{}", url_, offset_, eof ? "&eof=true" : ""),
          data.substr(data.size() - static_cast<size_t>(end - offset_)));
      if (!reply.ok()) {
        // Bytes that arrived in spite of it are ignored the second time.
        if (reply.error().code() != Code::kUnavailable) return false;
        if (!Wait(-1, static_cast<int>(kReattachPause.count()))) return false;
        continue;
      }
      const json taken = json::parse(reply->body, nullptr, false);
      if (!taken.is_object() || taken.value("closed", false)) return false;
      offset_ = std::min(end, std::max(offset_, taken.value("accepted", offset_)));
      if (offset_ == end) return true;
      if (!Wait(-1, 0)) return false;
    }
  }

  Connection api_;
  const std::string url_;
  uint64_t offset_ = 0;
  os::UniqueFd stop_;
  std::thread thread_;
};

// What our signals mean to the command.
class Interrupts {
 public:
  Interrupts(const SessionOptions& options, std::string url, Connection& stream)
      : url_(std::move(url)),
        tty_(options.tty),
        stream_(stream),
        api_(options.endpoint),
        given_up_(::eventfd(0, EFD_CLOEXEC)),
        thread_(std::make_unique<SignalThread>([this](int signal) { OnSignal(signal); })) {}
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;
  ~Interrupts() {
    api_.Abort();
    thread_.reset();
  }

  // The command exists from now on. Its terminal may have got another size meanwhile.
  void Started() {
    started_ = true;
    if (tty_) ::kill(::getpid(), SIGWINCH);
  }
  bool given_up() const { return gone_; }
  // False when a signal came first.
  bool Pause(std::chrono::milliseconds time) const {
    return !os::WaitReadable(given_up_.get(), Clock::System().Mono() + time).ok() || !gone_;
  }

 private:
  void OnSignal(int signal) {
    if (signal == SIGWINCH) {
      if (tty_ && started_) {
        [[maybe_unused]] const auto resized =
            api_.Call("POST", url_ + "/resize", WindowSize().dump());
      }
      return;
    }
    if (started_ && !cancelled_) {
      cancelled_ = true;
      if (api_.Call("POST", url_ + "/cancel", R"({"grace_ms":1000})").ok()) return;
    }
    // Not there yet, cannot be reached, or asked twice: leave. The platform ends what nobody
    // follows.
    gone_ = true;
    Wake(given_up_);
    stream_.Abort();
  }

  const std::string url_;
  const bool tty_;
  Connection& stream_;
  Connection api_;
  std::atomic<bool> started_ = false;
  std::atomic<bool> gone_ = false;
  bool cancelled_ = false;
  os::UniqueFd given_up_;
  std::unique_ptr<SignalThread> thread_;
};

bool Broken(const Error& error) {
  return error.code() == Code::kUnavailable || error.reason() == "client.timeout";
}

}  // namespace

json WindowSize() {
  winsize size{};
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_row != 0 && size.ws_col != 0) {
      return {{"rows", size.ws_row}, {"cols", size.ws_col}};
    }
  }
  return {{"rows", 24}, {"cols", 80}};
}

BlockedSignals::BlockedSignals() {
  const sigset_t wanted = OurSignals();
  pthread_sigmask(SIG_BLOCK, &wanted, &before_);
}
BlockedSignals::~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

SignalThread::SignalThread(std::function<void(int)> on_signal)
    : on_signal_(std::move(on_signal)), stop_(::eventfd(0, EFD_CLOEXEC)) {
  const sigset_t wanted = OurSignals();
  signals_ = os::UniqueFd(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  thread_ = std::thread([this] {
    while (true) {
      pollfd fds[] = {{stop_.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}};
      if (::poll(fds, 2, -1) < 0 && errno != EINTR) return;
      if (fds[0].revents != 0) return;
      signalfd_siginfo info{};
      if (::read(signals_.get(), &info, sizeof info) == sizeof info) {
        on_signal_(static_cast<int>(info.ssi_signo));
      }
    }
  });
}

SignalThread::~SignalThread() {
  Wake(stop_);
  thread_.join();
}

bool Printer::OnLine(std::string_view line) {
  const json record = json::parse(line, nullptr, false);
  if (!record.is_object()) return true;
  const std::string type = record.value("type", "");
  if (type == "started") started_ = true;
  if (type == "exit") result_ = record.value("result", json::object());
  if (type == "more") more_ = true;
  if (type == "error") {
    const json error = record.value("error", json::object());
    error_ = error.value("reason", "") + ": " + error.value("message", "");
  }
  if (type == "stdout" || type == "stderr") {
    if (!Output(record, type == "stdout")) output_closed_ = true;
  } else if (as_json_) {
    output_closed_ = !os::WriteAll(STDOUT_FILENO, std::string(line) + "\n").ok();
  }
  return !output_closed_;
}

bool Printer::Output(const json& record, bool to_stdout) {
  const auto data = http::DecodeBase64(record.value("data_b64", ""));
  if (!data.has_value()) return true;
  uint64_t& offset = to_stdout ? stdout_offset_ : stderr_offset_;
  offset = record.value("offset", offset) + data->size();
  if (as_json_) return os::WriteAll(STDOUT_FILENO, record.dump() + "\n").ok();
  if (const uint64_t skipped = record.value("skipped", uint64_t{0}); skipped > 0) {
    std::fprintf(stderr, "dsec: %llu bytes of %s were dropped here\n",
                 static_cast<unsigned long long>(skipped), to_stdout ? "stdout" : "stderr");
  }
  return os::WriteAll(to_stdout ? STDOUT_FILENO : STDERR_FILENO, *data).ok();
}

int Printer::Finish() const {
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

int RunSession(Connection& api, const SessionOptions& options) {
  const BlockedSignals blocked;
  const std::string url = options.exec_url + "/" + http::PercentEncode(options.op_id);
  Printer printer(options.as_json);
  Result<void> done;
  bool given_up = false;
  {
    const RawTerminal terminal(options.tty && options.input);
    Interrupts interrupts(options, url, api);
    std::unique_ptr<InputThread> input;
    bool announced = false;
    const auto on_line = [&](std::string_view line) {
      const bool goes_on = printer.OnLine(line);
      // Input and resizes can only be sent to a command that exists.
      if (printer.started() && !announced) {
        announced = true;
        interrupts.Started();
        if (options.input) input = std::make_unique<InputThread>(options.endpoint, url);
      }
      return goes_on;
    };
    done = api.Stream("POST", options.exec_url, options.body, on_line);
    MonoTime last = Clock::System().Mono();
    while (printer.started() && !printer.ended() && !printer.output_closed() &&
           (done.ok() || Broken(done.error())) && Clock::System().Mono() - last < kReattachFor &&
           interrupts.Pause(kReattachPause)) {
      const auto offsets = std::pair(printer.stdout_offset(), printer.stderr_offset());
      done = api.Stream("GET",
                        fmt::format("{}/stream?stdout_offset={}&stderr_offset={}", url,
                                    offsets.first, offsets.second),
                        "", on_line);
      if (offsets != std::pair(printer.stdout_offset(), printer.stderr_offset())) {
        last = Clock::System().Mono();
      }
    }
    given_up = interrupts.given_up();
  }
  if (given_up) return kExitCancelled;
  if (printer.output_closed()) return kExitOutputClosed;
  if (!done.ok()) return Fail(done.error());
  return printer.Finish();
}

}  // namespace dsec::cli
