// SPDX-License-Identifier: Apache-2.0
#include "sandbox/backends/fncall/warm_prelude.h"

namespace dsec::sandbox {
namespace {

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


class _Refused(Exception):
    pass


def _threads():
    return len(os.listdir("/proc/self/task"))


def _files():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 4:
            try:
                found[name] = os.readlink("/proc/self/fd/" + name)
            except OSError:
                pass  # that of the folder itself
    return found


def _shared_memory():
    name = None
    with open("/proc/self/smaps") as maps:
        for line in maps:
            words = line.split()
            if words[0] == "VmFlags:":
                if "sh" in words and "mw" in words:  # writable, now or after an mprotect
                    return name
            elif not words[0].endswith(":"):
                name = words[5] if len(words) > 5 else "memory"
    return None


# What a fork would have in common with others, or not have at all.
def _check(threaded, holding):
    pid = os.fork()
    if pid == 0:
        os._exit(0)  # some libraries end their threads for a fork
    os.waitpid(pid, 0)
    if _threads() > 1:
        raise _Refused("threads are started by the import of " + ", ".join(threaded))
    gc.collect()
    files = _files()
    if files:
        raise _Refused("files are left open by the import of " + ", ".join(holding) + ": " + ", ".join(files.values()))
    shared = _shared_memory()
    if shared is not None:
        raise _Refused("memory is shared with all forks after the imports: " + shared)


def _import(names):
    import importlib

    threaded, holding = [], []
    for name in names:
        threads, files = _threads(), len(_files())
        importlib.import_module(name)
        if _threads() > threads:
            threaded.append(name)
        if len(_files()) > files:
            holding.append(name)
    _touch()
    return threaded, holding


def _prepare():
    try:
        null = os.open("/dev/null", os.O_WRONLY)
        for fd in (1, 2):
            os.dup2(null, fd)
        os.close(null)
        try:
            import _socket
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            libc.setns, libc.prctl, libc.capset
            fork = ctypes.PyDLL(None).fork
        except (ImportError, OSError, AttributeError) as error:
            raise _Refused("this Python cannot fork into a call, for that it needs ctypes: " + str(error))
        _check(*_import(sys.argv[1:]))
        sys.stdout.flush()
        sys.stderr.flush()
        gc.collect()
        gc.freeze()
        return _socket, ctypes, libc, fork
    except BaseException as error:
        import traceback

        text = str(error) if isinstance(error, _Refused) else traceback.format_exc()
        os.write(4, b"E" + text.encode("utf-8", "replace")[-2000:])
        os._exit(1)


# Numbers of sched.h, prctl.h, capability.h.
_NAMESPACES = (0x20000, 0x8000000, 0x40000000, 0x10000000)  # mnt, ipc, net, user


def _require(result, ctypes, what):
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, what + ": " + os.strerror(error))


def _enter(fds, ctypes, libc):
    for fd, kind in zip(fds[1:5], _NAMESPACES):
        _require(libc.setns(fd, kind), ctypes, "enter a namespace")
    os.setsid()
    os.chdir("/work")


def _drop_rights(ctypes, libc):
    for capability in range(64):
        if libc.prctl(24, capability, 0, 0, 0) != 0:
            break  # past the kernel's last one
    _require(libc.capset(b"\x22\x05\x08\x20" + bytes(4), bytes(24)), ctypes, "drop capabilities")
    _require(libc.prctl(4, 1, 0, 0, 0), ctypes, "become dumpable")  # as after an exec


def _drop_calls(program, ctypes, libc):
    code = ctypes.cast(program, ctypes.c_void_p).value
    filter = (ctypes.c_uint64 * 2)(len(program) // 8, code)  # struct sock_fprog
    _require(libc.prctl(22, 2, ctypes.byref(filter), 0, 0), ctypes, "restrict system calls")


def _take_files(fds):
    for fd, place in zip(fds[5:9], (0, 1, 2, 3)):
        os.dup2(fd, place)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))


# What modules know or have drawn that each process should have of its own. `random` sees to itself.
def _renew():
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


# What every call touches; in a fork, pages that it writes to are copied now and not while it runs.
def _touch():
    exec(compile("print('', end='')", "", "exec"), {})
    gc.collect()


# In the first child: the second one is in the pid namespace of the cell, and this one ends, so that
# the next parent of the other is the runner.
def _become(program, fds, ctypes, libc):
    try:
        _require(libc.setns(fds[0], 0x20000000), ctypes, "enter the pid namespace")
        if os.fork() != 0:
            os._exit(0)
        _enter(fds, ctypes, libc)
        _drop_rights(ctypes, libc)
        _renew()
        _drop_calls(program, ctypes, libc)
        _take_files(fds)
        _touch()
        os.write(3, b"R")
    except BaseException as error:
        os.write(fds[8], b"E" + str(error).encode("utf-8", "replace"))
        os._exit(1)


# Comes back in each fork. The first of the two is that of libc, without what Python does for a child
# of its own: this one does nothing but to fork again, and half of the time is saved.
def _serve(_socket, ctypes, libc, fork):
    link = _socket.socket(fileno=4)
    os.write(4, b"R")
    while True:
        program, control, _, _ = link.recvmsg(65536, _socket.CMSG_SPACE(40))
        if not control:
            os._exit(0)
        fds = memoryview(control[0][2]).cast("i").tolist()
        first = fork() if _threads() == 1 else -1
        if first == 0:
            link.detach()
            return _become(program, fds, ctypes, libc)
        status = os.waitpid(first, 0)[1] if first > 0 else None
        for fd in fds:
            os.close(fd)
        os.write(4, b"F" if status == 0 else b"E" + ("the first fork: status %s" % status).encode())


def _wait():
    def read(size):
        data = b""
        while len(data) < size:
            part = os.read(3, size - len(data))
            if not part:
                os._exit(1)
            data += part
        return data

    digits = b""
    while not digits.endswith(b"\n"):
        digits += read(1)
    words = [os.fsdecode(word) for word in read(int(digits)).split(b"\0")]
    os.close(3)
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


_tools = _prepare()
_finish = _end(frozenset(sys.modules), os._exit, os.kill, os.getpid, signal.signal, atexit._run_exitfuncs, gc.collect,
               sys.__excepthook__)
_serve(*_tools)
_finish(_run(_wait()))
)py";

}  // namespace

std::string_view WarmPrelude() { return kPython; }

}  // namespace dsec::sandbox
