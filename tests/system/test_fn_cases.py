# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases 131 to 142: FnCall and judging."""

import os
import pathlib
import re
import signal
import subprocess
import tempfile
import threading
import time

import pytest

import support
from libdsec import DSecFnCallArgs, FnLimits, FnVerdict, errors
from support import MIB, wait_until

pytestmark = pytest.mark.usefixtures("languages")

# Neither wall nor CPU time can be exact to the last millisecond on a machine that others use as well.
SLACK = 0.2


def call(client, kind, code, **fields):
    return client.call(DSecFnCallArgs(type=kind, code=code, **fields))


def ok(result):
    assert result.ok, f"{result.verdict} {result.message} {result.step}"
    return result


BURN = "int main(void) {\n  for (volatile unsigned i = 0;; i++) {\n  }\n}\n"
STUBBORN = "#include <signal.h>\n" + BURN.replace(
    "{\n  for", "{\n  for (int s = 1; s < 65; s++) signal(s, SIG_IGN);\n  sigset_t all;\n  sigfillset(&all);\n"
    "  sigprocmask(SIG_BLOCK, &all, 0);\n  for", 1)
THREADS = """#include <pthread.h>
static void* burn(void* p) {
  for (volatile unsigned i = 0;; i++) {
  }
}
int main(void) {
  pthread_t t;
  for (int i = 0; i < 4; i++) pthread_create(&t, 0, burn, 0);
  return pthread_join(t, 0);
}
"""
CHILD = "#include <sys/wait.h>\n#include <unistd.h>\n" + BURN.replace("{\n  for", "{\n  if (fork() != 0) return wait(0) < 0;\n  for", 1)


@pytest.mark.parametrize("kind, code", [
    ("c", BURN), ("c", STUBBORN), ("c", THREADS), ("c", CHILD), ("python", "sum(range(10**12))"), ("bash", "while :; do :; done"),
], ids=["busy", "stubborn", "threads", "child", "library", "shell"])
def test_case_131_cpu_limit_of_the_tree(client, kind, code):
    result = call(client, kind, code, limits=FnLimits(cpu=2, wall=60))
    assert (result.verdict, result.run.limit) == (FnVerdict.TIME_LIMIT, "cpu")
    assert 2 - SLACK <= result.run.cpu_time <= 2 + 2 * SLACK
    assert call(client, "bash", "echo usable").text == "usable\n"


@pytest.mark.parametrize("kind, code", [
    ("bash", "sleep 60"), ("python", "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True:\n    signal.pause()"),
    ("c", "#include <unistd.h>\nint main(void) {\n  int p[2];\n  char c;\n  return pipe(p) || read(p[0], &c, 1);\n}\n"),
    ("bash", "sleep 60 & sleep 60 & wait"),
], ids=["sleep", "blocked", "read", "children"])
def test_case_131_wall_limit(client, kind, code):
    result = call(client, kind, code, limits=FnLimits(cpu=2, wall=5))
    assert (result.verdict, result.run.limit) == (FnVerdict.TIME_LIMIT, "wall")
    assert 5 - SLACK <= result.run.wall_time <= 5 + 5 * SLACK  # the machine may be busy with other tests
    assert call(client, "bash", "echo usable").text == "usable\n"


def test_case_131_output_in_a_loop_ends(client):
    result = call(client, "bash", "while :; do echo x; done", limits=FnLimits(cpu=2, wall=20, output_bytes=64 << 20))
    assert (result.verdict, result.run.limit) == (FnVerdict.TIME_LIMIT, "cpu")


ALLOCATE = "import sys\nx = bytearray(int(sys.argv[1]) << 20)\nfor i in range(0, len(x), 4096):\n    x[i] = 1\n"
SPEND = "import time\nwhile time.process_time() < 0.8:\n    pass\n"


def test_case_133_limits_are_set_anew(client):
    first = call(client, "python", ALLOCATE, args=["256"], limits=FnLimits(memory_mb=64))
    assert first.verdict is FnVerdict.MEMORY_LIMIT
    ok(call(client, "python", ALLOCATE, args=["256"]))
    ok(call(client, "python", ALLOCATE, args=["128"], limits=FnLimits(memory_mb=256)))
    assert call(client, "python", ALLOCATE, args=["128"], limits=FnLimits(memory_mb=64)).verdict is FnVerdict.MEMORY_LIMIT
    for _ in range(4):
        result = ok(call(client, "python", SPEND, limits=FnLimits(cpu=1.2)))
        assert result.run.cpu_time < 1.2
    small = ok(call(client, "python", "print(1)"))
    assert small.run.memory_peak_bytes < 64 * MIB  # no peak of an earlier call


HEAVY = "x = []\nwhile True:\n    x.append(bytearray(b'x') * (1 << 20))\n"


def test_case_134_memory_verdict_and_safe_neighbours(client):
    limits = FnLimits(memory_mb=128, wall=60)
    neighbour = "import time\nend = time.time() + 4\nn = 0\nwhile time.time() < end:\n    n += 1\n    time.sleep(0.01)\nprint(n > 50)\n"
    calls = [DSecFnCallArgs(type="python", code=neighbour, limits=FnLimits(wall=60))]
    calls += [DSecFnCallArgs(type="python", code=HEAVY, limits=limits) for _ in range(2)]
    results = dict(client.call_many(calls, concurrency=3))
    assert results[0].text == "True\n"
    for heavy in (results[1], results[2]):
        assert (heavy.verdict, heavy.run.limit) == (FnVerdict.MEMORY_LIMIT, "memory")
        assert 100 * MIB < heavy.run.memory_peak_bytes <= 130 * MIB
    untouched = call(client, "c", "#include <sys/mman.h>\nint main(void) {\n  return mmap(0, 10ul << 30, PROT_READ | PROT_WRITE, "
                     "MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED;\n}\n", limits=limits)
    ok(untouched)
    children = call(client, "bash", "for i in 1 2 3 4; do python3 -c 'x = bytearray(b\"x\") * (64 << 20); input()' < /dev/zero & done; wait",
                    limits=limits)
    assert children.verdict is FnVerdict.MEMORY_LIMIT


@pytest.mark.parametrize("code", [
    '#include "/dev/random"\n', '#include "/dev/zero"\n', '__asm__(".incbin \\"/dev/zero\\"");\n', "char a[2147483647] = {1};\n",
    '#include __FILE__\n#include __FILE__\n',
], ids=["random", "zero", "incbin", "array", "itself"])
def test_case_135_hostile_compile(client, code):
    limits = FnLimits(wall=5, cpu=5, memory_mb=512)
    result = call(client, "c", code + "int main(void) { return 0; }\n", compile_limits=limits)
    assert result.verdict is FnVerdict.COMPILE_ERROR and result.run is None
    assert result.compile.wall_time < 8 and len(result.stderr) <= MIB
    ok(call(client, "bash", "true"))


def test_case_135_no_foreign_file_in_messages(client):
    for path in ("../../../../etc/shadow", "/etc/shadow", "/proc/1/environ", "/proc/self/environ"):
        result = call(client, "c", f'#include "{path}"\nint main(void) {{ return 0; }}\n')
        assert b"root:" not in result.stderr and b"DSEC" not in result.stderr


def test_case_136_runtimes_fit_the_defaults(client):
    java = "public class M {\n  public static void main(String[] a) { System.out.println(Runtime.getRuntime().maxMemory() > 0); }\n}\n"
    pool = "import multiprocessing\nif __name__ == '__main__':\n    print(multiprocessing.Pool(3).map(abs, [-1, 2]))\n"
    big = "open('big', 'wb').write(b'x' * (50 << 20))\nprint('written')\n"
    limit = ("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\ntry:\n"
             "    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\nexcept ValueError:\n    print('soft')\n")
    for kind, code, text in (
        ("c", "#include <stdio.h>\nint main(void) { return puts(\"c\") < 0; }\n", "c\n"), ("java", java, "true\n"),
        ("javascript", "console.log('js');\n", "js\n"), ("go", 'package main\n\nfunc main() { print("") }\n', ""),
        ("python", pool, "[1, 2]\n"), ("python", big, "written\n"), ("python", limit, "soft\n"),
    ):
        assert ok(call(client, kind, code)).text == text


def test_case_137_odd_output(client):
    for data in (b"", b"\n", b"x", b"a\r\nb\r\n", b"a\0b", b"\xff\xfe\xc3"):
        result = ok(call(client, "python", f"import sys\nsys.stdout.buffer.write({data!r})\n"))
        assert result.stdout == data and result.run.stdout_total == len(data)
    large = call(client, "python", "import sys\nsys.stdout.write('x' * (64 << 20))\n")
    assert large.verdict is FnVerdict.OUTPUT_LIMIT and large.stdout == b"x" * MIB
    closed = call(client, "bash", "exec 1>&- 2>&-; exit 3")
    assert (closed.verdict, closed.exit_code, closed.stdout) == (FnVerdict.WRONG_EXIT, 3, b"")
    after = ok(call(client, "python", "import atexit\natexit.register(print, 'late')\nprint('early')\n"))
    assert after.text == "early\nlate\n"


def workers(node):
    """Processes in the cgroups of the node's FnCall workers, by worker: what a fault may hit, the runners as well as the
    programs."""
    worker = re.compile(rf"/dsec-{re.escape(node.node_id)}/(f\d[^/\n]*)")
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = pathlib.Path(f"/proc/{entry}/cgroup").read_text(encoding="ascii")
        except OSError:
            continue
        match = worker.search(groups)
        if match:
            found.setdefault(match.group(1), set()).add(int(entry))
    return found


def worker_pids(node):
    return set().union(*workers(node).values())


def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def runs(pid, words):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() == b"".join(word.encode() + b"\0" for word in words)
    except OSError:
        return False


def test_case_138_faults_of_the_environment_are_not_the_programs(node, client):
    client.put_fn_type("gone", {"environment": {"base": support.LANGUAGES}, "source": "m.c", "compile": {"argv": ["/usr/bin/no-compiler", "{source}"]},
                                "run": {"argv": ["./m"]}})
    result = call(client, "gone", "int main(void) { return 0; }")
    assert result.infrastructure and result.reason and "no-compiler" in result.message, result
    with pytest.raises(errors.NotFoundError) as caught:
        call(client, "bash", "true", container_image="no:such")
    assert caught.value.reason == "layer.not_found"
    client.delete_fn_type("gone")
    outcome = {}
    started = threading.Thread(target=lambda: outcome.update(r=call(client, "bash", "sleep 3; echo done", limits=FnLimits(wall=30))))
    started.start()
    kill(wait_until(lambda: worker_pids(node), 20, "a worker is there"))
    started.join(60)
    result = outcome["r"]
    assert result.ok and result.attempts > 1 or result.infrastructure or result.verdict is FnVerdict.SIGNALED, result


def test_case_138_full_disk_of_the_node_is_not_the_programs_fault(languages):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-test-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=4096", "none", folder], check=True)
    full = support.Node(folder, languages, "fnfull", scratch_bytes=32 * MIB)
    try:
        with full.start().client() as client:
            ok(call(client, "bash", "true"))
            with open(folder / "filler", "wb") as filler, pytest.raises(OSError):
                while True:
                    filler.write(bytes(MIB))
                    filler.flush()
            assert os.statvfs(folder).f_bavail == 0
            # What only the node wants to keep, for the next compile, is not the caller's concern.
            result = ok(call(client, "c", '#include <stdio.h>\nint main(void) { puts("right"); return 0; }\n'))
            assert result.text == "right\n"
            kept = call(client, "bash", "echo kept > f", fetch=["f"], keep_artifacts=True)
            assert kept.infrastructure and kept.retriable and kept.reason, kept
            with pytest.raises(errors.DSecError) as caught:
                client.put_artifact(b"bytes of an artefact")
            assert "No space left" in str(caught.value), caught.value
            (folder / "filler").unlink()
            kept = ok(call(client, "bash", "echo kept > f", fetch=["f"], keep_artifacts=True))
            assert client.get_artifact(kept.files["f"].artifact) == b"kept\n"
    finally:
        (folder / "filler").unlink(missing_ok=True)
        if full.process is not None and full.process.poll() is None:
            full.stop()
        purged = full.purge()
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
    assert purged.returncode == 0, purged.stderr


@pytest.mark.timeout(300)
def test_case_139_no_lost_calls(node, client):
    calls = [DSecFnCallArgs(type="bash", code=f"sleep 0.02; echo {i}") for i in range(1000)]
    stop = threading.Event()
    restarted = threading.Event()

    def killer():
        while not stop.wait(1.0):
            pids = sorted(worker_pids(node))
            if pids:
                kill([pids[int(time.monotonic() * 1000) % len(pids)]])
            if len(outcomes) > 300 and not restarted.is_set():
                node.kill()
                node.start()
                restarted.set()

    outcomes = {}
    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for index, result in client.call_many(calls, concurrency=64):
            assert index not in outcomes
            outcomes[index] = result
    finally:
        stop.set()
        thread.join()
    assert len(outcomes) == 1000 and restarted.is_set()
    good = [i for i, r in outcomes.items() if not isinstance(r, Exception) and r.ok]
    assert all(outcomes[i].text == f"{i}\n" for i in good)
    # A kill may hit the program itself, which is then a program that was killed.
    assert len(good) >= 900, [r for r in outcomes.values() if isinstance(r, Exception) or not r.ok][:5]
    ok(call(client, "bash", "true"))


def test_case_139_poison_stops_and_holds_up_nobody(node, client):
    stop = threading.Event()
    hit = set()

    def killer():
        # In place of a program that brings its worker down: it cannot, so we do, each time that it runs. The runner alone:
        # all else goes with it, and a program that is hit by itself is a program that was killed.
        while not stop.wait(0.005):
            for name, pids in workers(node).items():
                if any(runs(pid, ["sleep", "31415.9"]) for pid in pids):
                    hit.add(name)
                    kill(pid for pid in pids if _parent(pid) not in pids)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        outcome = {}
        poison = threading.Thread(target=lambda: outcome.update(r=call(client, "bash", "exec sleep 31415.9", limits=FnLimits(wall=120))))
        poison.start()
        with node.client() as other:
            for i in range(50):
                result = call(other, "bash", f"echo {i}")
                assert result.ok and result.text == f"{i}\n", result
        poison.join(60)
    finally:
        stop.set()
        thread.join()
    result = outcome["r"]
    assert result.infrastructure and result.reason == "fn.poison" and not result.retriable, result
    assert result.attempts == len(hit) == 3


def test_case_140_no_cross_talk(node, client):
    for _ in range(3):
        ok(call(client, "bash", "true"))
    before = (node.fds(), node.threads(), node.rss_kib())
    tokens = [os.urandom(8).hex() for _ in range(3000)]
    calls = (DSecFnCallArgs(type="bash", code="cat; exit $1", stdin=token, args=[str(i % 200)], limits=FnLimits(wall=5))
             for i, token in enumerate(tokens))
    waited = 0.0
    for index, result in client.call_many(calls, concurrency=64):
        assert (result.text, result.exit_code) == (tokens[index], index % 200), result
        assert result.run.wall_time < 5
        waited = max(waited, result.queue_time)
    assert waited > 0
    zombies = [entry for entry in filter(str.isdigit, os.listdir("/proc"))
               if _state(entry) == "Z" and _parent(entry) == node.process.pid]
    assert zombies == []
    wait_until(lambda: node.threads() <= before[1] + 64, 30, "threads are as before")
    assert node.fds() <= before[0] + 512
    # The results of all calls are kept for a while.
    assert node.rss_kib() <= before[2] + (32 << 10)


def _stat(entry):
    try:
        return pathlib.Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return ["", "0"]


def _state(entry):
    return _stat(entry)[0]


def _parent(entry):
    return int(_stat(entry)[1])


def test_case_141_helpers_do_not_outlive_main(client):
    code = "(sleep 1; echo late; echo late > result) &\nwhile :; do :; done &\nsleep 0.3\necho early > result\necho early\n"
    started = time.monotonic()
    result = ok(call(client, "bash", code, fetch=["result"], limits=FnLimits(wall=60)))
    assert result.text == "early\n" and result.files["result"].content == b"early\n"
    assert result.run.wall_time < 1 or time.monotonic() - started < 30
    assert result.run.cpu_time > 0.05  # of the helper that burns
    again = ok(call(client, "bash", "sleep 1.5; ps -e -o args= | grep -c '[s]leep 1$' || true; cat result 2>/dev/null || echo none"))
    assert again.text == "0\nnone\n"


LOOK = r"""
import os, sys
found = []
for root in ("/", "/tmp", "/dev/shm", "/var/tmp", "/proc", "/sys", "/run"):
    for folder, folders, files in os.walk(root):
        if root == "/" and folder.startswith(("/proc", "/sys", "/usr", "/lib")):
            folders[:] = []
            continue
        for name in files:
            if "cgroup" in folder:
                continue
            path = os.path.join(folder, name)
            try:
                if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
                    continue
                with open(path, "rb") as file:
                    if sys.argv[1].encode() in file.read(1 << 20) and f"/{os.getpid()}/" not in path and "/self/" not in path \
                            and "/thread-self/" not in path:
                        found.append(path)
            except OSError:
                pass
print(found)
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 3))
print([pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())])
"""


def test_case_142_answers_are_out_of_reach(client):
    secret = os.urandom(16).hex()
    ok(call(client, "bash", f"echo {secret} > answer; echo {secret} > /tmp/answer; echo {secret} > /dev/shm/answer",
            files={"expected.txt": secret}, stdin=secret, env={"SECRET": secret}))
    half = secret[:16]
    look = LOOK.replace("sys.argv[1].encode()", f"({half!r} + sys.argv[1]).encode()")
    result = ok(call(client, "python", look, args=[secret[16:]], limits=FnLimits(wall=60, cpu=60)))
    assert result.text.splitlines() == ["[]", "[0, 1, 2]", "[]"], result.text
