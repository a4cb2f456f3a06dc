// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/warm.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>

#include "os/fd_passing.h"
#include "os/file.h"
#include "os/memfd.h"
#include "spawn/agent_abi.h"

namespace dsec::sandbox {
namespace {

namespace abi = spawn::abi;

constexpr size_t kMaxSaid = 4096;

// Descriptor 3 is this text, 4 the link to the daemon. Says "R" once the modules are there, or "E"
// and why not; reads the length of what follows as a decimal line, then strings, each ended by NUL:
// the path of the code, the number of arguments, the arguments, the environment.
// The end is that of an interpreter, without taking down what was there before the code: that is
// most of the time of a short call. What the code made is finalized: its threads are awaited, its
// exit functions run, its modules and their objects collected (frozen are those of before), its
// output flushed. Exit statuses are those of Python: 1 after an exception, 120 when the output
// cannot be written, SIGINT after KeyboardInterrupt.
constexpr std::string_view kPython = R"py(
import atexit
import gc
import os
import signal
import sys
from types import ModuleType


def _prepare():
    import importlib

    try:
        for name in sys.argv[1:]:
            importlib.import_module(name)
        exec(compile("print('', end='')", "", "exec"), {})  # what every call touches is there
        gc.collect()
        gc.freeze()
    except BaseException:
        import traceback

        os.write(4, b"E" + traceback.format_exc().encode("utf-8", "replace")[-2000:])
        os._exit(1)


def _wait():
    os.write(4, b"R")

    def read(size):
        data = b""
        while len(data) < size:
            part = os.read(4, size - len(data))
            if not part:
                os._exit(1)
            data += part
        return data

    digits = b""
    while not digits.endswith(b"\n"):
        digits += read(1)
    words = [os.fsdecode(word) for word in read(int(digits)).split(b"\0")]
    os.close(3)
    os.close(4)
    count = int(words[1])
    os.environ.clear()
    for item in words[2 + count : -1]:
        key, _, value = item.partition("=")
        os.environ[key] = value
    sys.argv[:] = words[: 1] + words[2 : 2 + count]
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    return words[0]


def _run(path):
    with open(path, "rb") as file:
        text = file.read()
    main = ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    try:
        exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        return error.code
    except BaseException as error:
        # As at the top level, without the frames of this file.
        error.__traceback__ = error.__traceback__.tb_next
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as another:
            return another.code
        except BaseException:
            sys.__excepthook__(type(error), error, error.__traceback__)
        return KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else 1
    return None


# Keeps what the code may have replaced by the time it is needed.
def _end(before, exit, kill, pid, set_signal, run_exits, collect, show):
    def guard(action):
        try:
            action()
            return True
        except BaseException as error:
            try:
                show(type(error), error, error.__traceback__)
            except BaseException:
                pass
            return False

    def flush(file):
        if file is not None and not file.closed:
            file.flush()

    def finish(code):
        result = code & 0xFF if isinstance(code, int) else int(code is not None)
        if result and not isinstance(code, int) and code is not KeyboardInterrupt:
            guard(lambda: print(code, file=sys.stderr))
        if "threading" in sys.modules:
            guard(lambda: sys.modules["threading"]._shutdown())
        guard(run_exits)
        guard(collect)  # puts what is in use in the order in which it must be finalized
        for name in [name for name in sys.modules if name not in before or name == "__main__"]:
            del sys.modules[name]
        guard(collect)
        written = [guard(lambda: flush(file)) for file in (sys.stdout, sys.__stdout__)]
        for file in (sys.stderr, sys.__stderr__):
            guard(lambda: flush(file))
        if code is KeyboardInterrupt:
            set_signal(signal.SIGINT, signal.SIG_DFL)
            kill(pid(), signal.SIGINT)
        exit(result if all(written) else 120)

    def end(code):
        try:
            finish(code)
        finally:
            exit(1)

    return end


_prepare()
_finish = _end(frozenset(sys.modules), os._exit, os.kill, os.getpid, signal.signal, atexit._run_exitfuncs, gc.collect,
               sys.__excepthook__)
_finish(_run(_wait()))
)py";

Result<WarmProgram> Failed(std::string why) {
  return Error(Code::kFailedPrecondition, "fn.warm_failed", std::move(why));
}

void AppendString(std::string& text, std::string_view word) {
  text.append(word);
  text.push_back('\0');
}

// Takes InitStarted for the pidfd. False: something else, or nothing yet.
Result<bool> TakeStarted(int channel, os::PidFd& process) {
  union {
    uint32_t type = 0;
    abi::InitStarted started;
    abi::InitEnded ended;
  } message;
  int fd = -1;
  size_t count = 1;
  const ssize_t size =
      os::ReceivePacketRaw(channel, &message, sizeof(message), &fd, &count, MSG_DONTWAIT);
  os::UniqueFd pidfd(count == 1 ? fd : -1);
  if (size == -EAGAIN) return false;
  if (size <= 0) return Error(Code::kUnavailable, "fn.worker_died", "the cell's init has ended");
  if (static_cast<size_t>(size) != sizeof(message.started) || message.type != abi::kStarted ||
      !pidfd.valid()) {
    return Error(Code::kFailedPrecondition, "fn.warm_failed", "the interpreter ended at once");
  }
  DSEC_TRY(process, os::PidFd::Adopt(std::move(pidfd)));
  return true;
}

}  // namespace

Result<void> CheckWarm(const v1::FnWarm& warm) {
  if (warm.kind().empty()) return Ok();
  if (warm.kind() != "python") {
    return Error(Code::kInvalidArgument, "fn.bad_warm",
                 fmt::format("warm.kind '{}' is not python", warm.kind()))
        .WithField("warm.kind");
  }
  if (warm.argv().empty()) {
    return Error(Code::kInvalidArgument, "fn.bad_warm", "warm.argv names no interpreter")
        .WithField("warm.argv");
  }
  return Ok();
}

Result<WarmProgram> StartWarm(int channel, int group, const v1::FnWarm& warm, int cancel,
                              runtime::Deadline deadline) {
  int link[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link) != 0)
    return os::ErrnoError("fn.warm", "make a socket");
  WarmProgram made;
  made.link.Reset(link[0]);
  os::UniqueFd theirs(link[1]);
  DSEC_TRY(
      const auto text,
      os::SealedMemfd("warm", {reinterpret_cast<const uint8_t*>(kPython.data()), kPython.size()}));
  // An offset of its own for whoever reads it.
  DSEC_TRY(const auto script,
           os::OpenAt(AT_FDCWD, fmt::format("/proc/self/fd/{}", text.get()).c_str(), O_RDONLY));
  std::vector<std::string> argv(warm.argv().begin(), warm.argv().end());
  argv.emplace_back("/proc/self/fd/3");
  argv.insert(argv.end(), warm.imports().begin(), warm.imports().end());
  const int extra[] = {script.get(), theirs.get()};
  DSEC_TRY(made.program,
           StartProgram(channel, group, argv, {{"PATH", "/usr/local/bin:/usr/bin:/bin"}},
                        OpenRlimits(), extra));
  theirs.Reset();
  std::string said;
  while (said.empty() || !made.process.valid()) {
    pollfd items[] = {{channel, POLLIN, 0}, {made.link.get(), POLLIN, 0}, {cancel, POLLIN, 0}};
    if (made.process.valid()) items[0].fd = -1;
    if (!said.empty()) items[1].fd = -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.Remaining()).count();
    const int ready = ::poll(items, 3, static_cast<int>(std::clamp<int64_t>(left, 0, 60'000)));
    if (ready < 0 && errno != EINTR) return os::ErrnoError("fn.poll", "wait for an interpreter");
    if (items[2].revents != 0)
      return Error(Code::kCancelled, "task.cancelled", "the worker is ended");
    if (deadline.Expired()) return Failed("the interpreter was not ready in time");
    if (items[0].revents != 0) DSEC_TRY_VOID(TakeStarted(channel, made.process));
    if (items[1].revents == 0) continue;
    said.resize(kMaxSaid);
    const ssize_t n = ::recv(made.link.get(), said.data(), said.size(), 0);
    said.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
    if (said.empty()) {
      abi::ExecFailure failure;
      if (::read(made.program.status.get(), &failure, sizeof(failure)) == sizeof(failure)) {
        return Error::FromErrno(failure.sys_errno, "fn.warm_failed",
                                fmt::format("execute {}", argv.front()));
      }
      return Failed("the interpreter ended before it was ready");
    }
  }
  if (said != "R") return Failed(said.substr(1));
  made.program.status.Reset();
  return made;
}

Result<void> HandOver(const WarmProgram& warm, const FnRun& run) {
  for (const Rlimit& limit : RlimitsOf(run.limits)) {
    const rlimit value = {limit.soft, limit.hard};
    if (::prlimit(warm.process.pid(), static_cast<__rlimit_resource>(limit.resource), &value,
                  nullptr) != 0 &&
        errno != ESRCH) {
      return os::ErrnoError("fn.limits", "set the limits of an interpreter");
    }
  }
  std::string words;
  AppendString(words, run.code_path);
  // What follows the code on the command line are its arguments.
  auto first = std::ranges::find(run.argv, run.code_path);
  if (first != run.argv.end()) ++first;
  AppendString(words, fmt::format("{}", run.argv.end() - first));
  for (; first != run.argv.end(); ++first) AppendString(words, *first);
  for (const auto& [key, value] : run.env) AppendString(words, key + "=" + value);
  std::string message = fmt::format("{}\n", words.size()) + words;
  std::string_view left = message;
  while (!left.empty()) {
    const ssize_t n =
        ::send(warm.link.get(), left.data(), left.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) return Ok();
    if (n < 0) return os::ErrnoError("fn.warm", "hand a call to an interpreter");
    left.remove_prefix(static_cast<size_t>(n));
  }
  return Ok();
}

}  // namespace dsec::sandbox
