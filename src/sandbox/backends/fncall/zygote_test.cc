// SPDX-License-Identifier: Apache-2.0
// The interpreter that warm calls are forks of: what a fork may do, and what becomes of an
// interpreter that does not do its part. The layer's code is played by a changed prelude.
#include <gmock/gmock.h>

#include <set>

#include "sandbox/testing/warm_fixture.h"

namespace dsec::sandbox {
namespace {

using ::testing::HasSubstr;

class FnZygote : public testing::WarmTest {
 protected:
  // An interpreter that runs `first`, then the prelude with `from` as `to`.
  Result<std::unique_ptr<FnWorker>> Changed(std::string_view from, std::string_view to,
                                            std::string_view first = "",
                                            const std::vector<std::string>& imports = {}) {
    const std::string text = fmt::format(
        "import sys\n"
        "del sys.argv[0]\n"
        "text = open(sys.argv[0]).read()\n"
        "assert r'''{0}''' in text\n"
        "{2}\n"
        "exec(compile(text.replace(r'''{0}''', r'''{1}'''), 'prelude', 'exec'))\n",
        from, to, first);
    return TryWarm(WarmOf(imports, {"-c", text}));
  }
  // A module of that text among the layer's.
  Result<std::unique_ptr<FnWorker>> Importing(std::string_view text) {
    const std::string first = fmt::format(
        "open('/tmp/given.py', 'w').write(r'''{}''')\n"
        "sys.path.insert(0, '/tmp')\n",
        text);
    return Changed("", "", first, {"json", "given"});
  }
};

// But for its parent, which is not in the cell: getppid() is 0.
TEST_F(FnZygote, Fork_IsWhatAProgramOfACallIs) {
  const std::string_view code =
      "import ctypes, os, resource\n"
      "lines = [line.split() for line in open('/proc/self/status')]\n"
      "status = {line[0]: line[1:] for line in lines if line}\n"
      "print([(key, status[key + ':']) for key in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd',\n"
      "       'CapAmb', 'Uid', 'Gid', 'Groups', 'Threads', 'NSpid', 'SigBlk', 'Seccomp')])\n"
      "print(os.getpid(), os.getsid(0), os.getpgrp(), os.umask(0o22), os.getcwd())\n"
      "print(sorted(os.listdir('/proc/self/fd')), os.listdir('/'), os.listdir('/work'))\n"
      "print(sorted(name for name in os.listdir('/proc') if name.isdigit()))\n"
      "print(sorted(line.split()[4] for line in open('/proc/self/mountinfo')))\n"
      "print({line.rsplit(':', 1)[1].strip() for line in open('/proc/self/cgroup')})\n"
      "print(os.stat('/proc/self/fd').st_uid)\n"
      "print([(limit, resource.getrlimit(limit)) for limit in range(16)])\n"
      "print([os.stat('/proc/self/ns/' + ns).st_ino == os.stat('/proc/thread-self/ns/' + "
      "kind).st_ino\n"
      "       for ns, kind in (('pid', 'pid_for_children'), ('time', 'time_for_children'))])\n"
      "libc = ctypes.CDLL(None, use_errno=True)\n"
      "own = os.open('/proc/self/ns/mnt', os.O_RDONLY)\n"
      "tries = {'setns': (own, 0), 'unshare': (0x10000000,), 'mount': (0, b'/', 0, 0x1000, 0),\n"
      "         'umount2': (b'/proc', 2), 'chroot': (b'/',), 'setuid': (0,), 'sethostname': (b'x', "
      "1)}\n"
      "print([(name, getattr(libc, name)(*args), ctypes.get_errno()) for name, args in "
      "tries.items()])\n"
      "try:\n"
      "    os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-1')\n"
      "    print('a lower score')\n"
      "except OSError as error:\n"
      "    print(error)\n"
      "try:\n"
      "    open('/proc/1/environ')\n"
      "except OSError as error:\n"
      "    print(error)\n";
  const auto warm = Warm({"ctypes", "resource"});
  ASSERT_NE(warm, nullptr);
  const FnReport fork = Must(*warm, Code(code));
  const auto plain = MakeWorker({}, "test-python:1");
  ASSERT_NE(plain, nullptr);
  const FnReport program = Must(*plain, Code(code));
  EXPECT_EQ(program.step.verdict(), v1::FN_OK) << program.step.stderr().data();
  EXPECT_EQ(fork.step.stdout().data(), program.step.stdout().data()) << fork.step.stderr().data();
  EXPECT_EQ(fork.step.stdout().data().find("a lower score"), std::string::npos);
}

TEST_F(FnZygote, Victim_IsTheCallAndNotTheInterpreterThatIsLarger) {
  // The interpreter holds more than the call may have.
  const auto made = Importing("held = bytearray(b'x') * (96 << 20)\n");
  ASSERT_TRUE(made.ok()) << made.error().ToString();
  const auto& worker = *made;
  FnRun run = Code(
      "import os\nprint(open('/proc/self/oom_score_adj').read(), flush=True)\n"
      "os.execv('/bin/sh', ['sh', '-c', 'x=x; while :; do x=$x$x; done'])\n");
  run.limits.set_memory_bytes(32 << 20);
  const FnReport report = Must(*worker, run);
  EXPECT_EQ(report.step.verdict(), v1::FN_MEMORY_LIMIT);
  EXPECT_EQ(report.step.stdout().data(), "1000\n\n");
  EXPECT_EQ(Must(*worker, Code("print(len(__import__('given').held))")).step.stdout().data(),
            "100663296\n");
}

TEST_F(FnZygote, ProcessThatAsksToBeTraced_HasNotEnded) {
  const auto worker = Warm({"ctypes"});
  ASSERT_NE(worker, nullptr);
  FnRun run = Code(
      "import ctypes, os, signal\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"
      "os.kill(os.getpid(), signal.SIGSTOP)\n");
  run.limits.set_wall_ms(500);
  EXPECT_EQ(Must(*worker, run).step.verdict(), v1::FN_TIME_LIMIT);
}

TEST_F(FnZygote, ChildrenOfTheRunnersOwn_HoldNobodyUp) {
  const auto worker = Warm({"ctypes"});
  ASSERT_NE(worker, nullptr);
  // clone(CLONE_PARENT | SIGCHLD): hundreds of ends are told by the runner.
  FnRun run = Code(
      "import ctypes\nlibc = ctypes.CDLL(None)\nfor _ in range(600):\n"
      "    if libc.syscall(56, 0x8000 | 17, 0, 0, 0, 0) == 0:\n"
      "        libc.pause()\nprint('made')\n");
  run.limits.set_processes(1000);
  const FnReport report = Must(*worker, run);
  EXPECT_EQ(report.step.verdict(), v1::FN_OK) << report.step.stderr().data();
  EXPECT_EQ(Must(*worker, Code("print('next')")).step.stdout().data(), "next\n");
}

TEST_F(FnZygote, ForkThatKeepsSomething_GetsNoCall) {
  struct Row {
    const char* from;
    const char* to;
    const char* said;
  };
  const std::vector<Row> rows = {
      {"        _drop_rights(ctypes, libc)\n", "", "Cap"},
      {"if libc.prctl(24, capability, 0, 0, 0) != 0:", "if True:", "CapBnd"},
      {"        _drop_calls(program, ctypes, libc)\n", "", "Seccomp_filters"},
      {"        _enter(fds, ctypes, libc)\n",
       "        _require(libc.setns(fds[4], 0x10000000), ctypes, '')\n", "ns/mnt"},
      {"zip(fds[1:5], _NAMESPACES)", "zip(fds[1:4], _NAMESPACES)", "Cap"},
      {"    os.chdir(\"/work\")\n", "", "cwd"},
      {"    os.chdir(\"/work\")\n", "    os.chdir(\"/work\")\n    os.chroot(\"/tmp\")\n", "root"},
      {"os.closerange(4, ", "os.closerange(5, ", "descriptors"},
      {"zip(fds[5:9], (0, 1, 2, 3))", "zip((4, 4, 4, fds[8]), (0, 1, 2, 3))", "fd/0"},
      {"        _require(libc.setns(fds[0], 0x20000000), ctypes, \"enter the pid namespace\")\n",
       "", "ns/pid"},
      {"        os.write(3, b\"R\")\n",
       // Another socket, from which nothing ever comes, not even an end.
       "        keep = os.dup(3)\n        other = __import__('_socket').socket(1, 2)\n"
       "        os.dup2(other.fileno(), 3)\n        os.write(keep, b\"R\")\n"
       "        os.closerange(4, 64)\n",
       "fd/3"},
      {"        os.write(3, b\"R\")\n", "        os._exit(0)\n", "ended"}};
  for (const Row& row : rows) {
    const auto made = Changed(row.from, row.to);
    ASSERT_FALSE(made.ok()) << row.from << row.to;
    EXPECT_EQ(made.error().reason(), "fn.worker_broken") << made.error().ToString();
    EXPECT_THAT(made.error().message(), HasSubstr(row.said)) << row.from << row.to;
  }
}

TEST_F(FnZygote, Imports_ThatForksCannotHaveAreNamed) {
  struct Row {
    const char* text;
    const char* said;
  };
  const std::vector<Row> rows = {
      {"import threading, time\n"
       "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
       "threads are started by the import of given"},
      {"file = open('/etc/passwd')\n", "files are left open by the import of given: /etc/passwd"},
      {"import mmap\nmemory = mmap.mmap(-1, 4096)\n", "memory is shared with all forks"},
      {"import mmap, os\nfile = os.open('/tmp/shared', os.O_RDWR | os.O_CREAT)\n"
       "os.ftruncate(file, 4096)\nmemory = mmap.mmap(file, 4096, prot=mmap.PROT_READ)\n"
       "os.close(file)\nimport ctypes\n"
       "os.closerange(5, 64)\n",
       "memory is shared with all forks after the imports: /tmp/shared"},
      {"import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n",
       "processes are started by the imports"},
      {"import sys\nsys.exit(3)\n", "SystemExit: 3"},
      {"memory = bytearray(4 << 30)\n", ""},
      {"import os\nos._exit(3)\n", "ended before it was ready"}};
  for (const Row& row : rows) {
    const auto made = Importing(row.text);
    ASSERT_FALSE(made.ok()) << row.text;
    EXPECT_EQ(made.error().reason(), "fn.warm_failed") << made.error().ToString();
    EXPECT_EQ(made.error().code(), Code::kFailedPrecondition);
    EXPECT_THAT(made.error().message(), HasSubstr(row.said)) << row.text;
  }
  const auto made = Changed("", "", "sys.modules['_ctypes'] = None");
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().reason(), "fn.warm_failed");
  EXPECT_THAT(made.error().message(), HasSubstr("needs ctypes"));
}

// What it prints while it imports is nobody's output, and files that it makes are in no call.
TEST_F(FnZygote, ImportsThatWrite_LeaveNothingInACall) {
  const auto worker = Importing(
      "import sys\nprint('x' * 100000)\nprint('y' * 100000, file=sys.stderr)\n"
      "open('/work/made', 'w').write('made')\nopen('/tmp/made', 'wb').write(bytes(4 << 20))\n");
  ASSERT_TRUE(worker.ok()) << worker.error().ToString();
  for (int i = 0; i < 2; ++i) {
    const FnReport report =
        Must(**worker, Code("import os\nprint(os.listdir('/tmp'), os.listdir('/work'))\n"));
    EXPECT_EQ(report.step.stdout().data(), "[] ['main.py']\n") << report.step.stderr().data();
    EXPECT_EQ(report.step.stderr().data(), "");
    EXPECT_FALSE(report.dirty) << report.dirt;
  }
}

TEST_F(FnZygote, ImportWithoutEnd_IsGivenUp) {
  const auto made =
      TryWarm(WarmOf({}, {"-c", "import time\ntime.sleep(1000)"}), std::chrono::milliseconds(500));
  ASSERT_FALSE(made.ok());
  EXPECT_EQ(made.error().code(), Code::kDeadlineExceeded) << made.error().ToString();
}

TEST_F(FnZygote, EndOfTheInterpreter_IsTheWorkersAfterTheCall) {
  const auto worker = Changed("        fds = memoryview",
                              "        forked = globals().setdefault('forked', [])\n"
                              "        forked.append(1)\n"
                              "        if len(forked) > 2: os._exit(0)\n"
                              "        fds = memoryview");
  ASSERT_TRUE(worker.ok()) << worker.error().ToString();
  EXPECT_EQ(Must(**worker, Code("print(1)\n")).step.stdout().data(), "1\n");
  EXPECT_EQ(Must(**worker, Code("print(2)\n")).step.stdout().data(), "2\n");
  const auto report = Run(**worker, Code("print(3)\n"));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_broken");
  EXPECT_THAT(report.error().message(), HasSubstr("the warm interpreter has ended"));
}

// A fork that ends while it waits has had no call: it is the platform that failed.
TEST_F(FnZygote, ForkThatEndsBeforeItsCall_IsNoVerdict) {
  const auto worker = Changed("        os.write(3, b\"R\")\n",
                              "        os.write(3, b\"R\")\n"
                              "        import time\n"
                              "        time.sleep(0.3)\n"
                              "        os._exit(0)\n");
  ASSERT_TRUE(worker.ok()) << worker.error().ToString();
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  const auto report = Run(**worker, Code("print(1)\n"));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_broken") << report.error().ToString();
}

TEST_F(FnZygote, ProcessBesideTheCall_EndsTheWorker) {
  const auto worker = Changed("        fds = memoryview",
                              "        if os.fork() == 0:\n"
                              "            import time\n"
                              "            time.sleep(1000)\n"
                              "        fds = memoryview");
  ASSERT_TRUE(worker.ok()) << worker.error().ToString();
  const FnReport first = Must(**worker, Code("print(1)\n"));
  EXPECT_EQ(first.step.stdout().data(), "1\n");
  EXPECT_TRUE(first.dirty);
  const auto report = Run(**worker, Code("print(2)\n"));
  ASSERT_FALSE(report.ok());
  EXPECT_EQ(report.error().reason(), "fn.worker_broken");
}

// Within reach of a call is a copy: whatever it does there, the next one has it as imported.
TEST_F(FnZygote, Calls_CannotChangeTheInterpreter) {
  const auto worker = Warm({"json", "random", "multiprocessing"});
  ASSERT_NE(worker, nullptr);
  const std::string_view code =
      "import gc, json, multiprocessing, os, random, signal, sys\n"
      "print(json.dumps([1]), len(gc.get_objects()) > 0, hash('x'), sys.getrecursionlimit())\n"
      "print(random.random(), multiprocessing.current_process().authkey.hex())\n"
      "json.dumps = None\n"
      "sys.setrecursionlimit(77)\n"
      "for one in list(sys.modules): sys.modules[one] = None\n"
      "for fd in range(4, 64):\n"
      "    try: os.write(fd, b'E')\n"
      "    except OSError: pass\n"
      "for pid in range(2, 64):\n"
      "    try:\n"
      "        if pid != os.getpid(): os.kill(pid, signal.SIGKILL)\n"
      "    except OSError: pass\n"
      "sys.stdout.flush()\n"
      "os.kill(os.getpid(), signal.SIGKILL)\n";
  std::set<std::string> first_lines, second_lines;
  for (int i = 0; i < 4; ++i) {
    const FnReport report = Must(*worker, Code(code));
    EXPECT_EQ(report.step.signal(), SIGKILL) << report.step.stderr().data();
    const std::string out = report.step.stdout().data();
    first_lines.insert(out.substr(0, out.find('\n')));
    second_lines.insert(out.substr(out.find('\n')));
  }
  EXPECT_EQ(first_lines.size(), 1u) << "as imported, each time";
  EXPECT_THAT(*first_lines.begin(), HasSubstr("[1] True"));
  EXPECT_EQ(second_lines.size(), 4u) << "each has random numbers of its own";
}

TEST_F(FnZygote, Interpreter_IsRenewedAfterAThousandForks) {
  const auto worker = Warm({});
  ASSERT_NE(worker, nullptr);
  constexpr int kForks = 1000;
  std::string before;
  for (int i = 0; i < kForks; ++i) {
    const FnReport report = Must(*worker, Code("print(hash('x'))\n"));
    ASSERT_EQ(report.step.verdict(), v1::FN_OK) << i;
    ASSERT_FALSE(report.dirty) << report.dirt;
    if (i == 0) before = report.step.stdout().data();
    ASSERT_EQ(report.step.stdout().data(), before) << i;
  }
  const FnReport report = Must(*worker, Code("print(hash('x'))\n"));
  EXPECT_NE(report.step.stdout().data(), before);
  EXPECT_EQ(report.step.verdict(), v1::FN_OK);
}

}  // namespace
}  // namespace dsec::sandbox
