# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: output floods, encoding, order; terminals."""

import concurrent.futures
import hashlib
import pathlib
import re
import threading
import time

import pytest

from libdsec import Exited, Signaled, Timeout, errors
from support import MIB, args, sandbox, wait_until


def test_case_026_endless_output_is_bounded(node, client):
    with sandbox(client) as box, sandbox(client) as other:
        before = node.rss_kib()
        detached = box.start(["yes"])
        slowest = 0.0
        result = []
        runner = threading.Thread(target=lambda: result.append(box.run_shell("yes", timeout=6)))
        runner.start()
        while runner.is_alive():
            started = time.monotonic()
            assert other.run_shell("echo ok").stdout == b"ok\n"
            slowest = max(slowest, time.monotonic() - started)
        runner.join()
        detached.cancel()
        assert result[0].end == Timeout(6000) and result[0].truncated
        assert len(result[0].stdout) <= MIB
        assert result[0].stdout_total == len(result[0].stdout) + result[0].stdout_dropped
        assert slowest < 2
        assert node.rss_kib() - before < 64 * 1024


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("size,truncated", [(9999, False), (10000, False), (10001, True), (16384, True)])
@pytest.mark.vm
def test_case_027_cap_boundary_is_exact(shared, stream, size, truncated):
    redirect = " >&2" if stream == "stderr" else ""
    result = shared.run_shell(f"head -c {size} /dev/zero{redirect}", output_bytes=10000)
    assert getattr(result, f"{stream}_total") == size
    assert result.truncated is truncated
    assert len(getattr(result, stream)) == min(size, 10000)
    assert getattr(result, f"{stream}_dropped") == max(0, size - 10000)


@pytest.mark.vm
def test_case_027_cap_of_a_call_overrides(shared):
    result = shared.run_shell("head -c 3000000 /dev/zero", output_bytes=16 * MIB)
    assert len(result.stdout) == 3000000 and not result.truncated


def test_case_028_huge_line_and_big_bursts(shared):
    result = shared.run_shell("head -c 67108864 /dev/zero | tr '\\0' x")
    assert result.end == Exited(0) and result.stdout_total == 64 * MIB and set(result.stdout) == {ord("x")}
    for size in (33 << 10, 257 << 10, MIB):
        assert len(shared.run_shell(f"head -c {size} /dev/zero").stdout) == size
    assert shared.run_shell("echo next").stdout == b"next\n"


@pytest.mark.vm
def test_case_029_binary_output_is_exact(shared):
    result = shared.run_shell("head -c 1048576 /dev/urandom | tee /tmp/r")
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(shared.files.read("/tmp/r")).digest()
    assert shared.run_shell("printf '\\342'").stdout == b"\xe2"
    assert shared.run_shell("printf 'a\\0b\\033[31m'").stdout == b"a\0b\x1b[31m"
    assert shared.run_shell("head -c 100000 /dev/zero | tr '\\0' '\\377'").stdout == b"\xff" * 100000


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.vm
def test_case_030_characters_across_chunks(shared, stream):
    code = f"import sys,time; o=sys.{stream}.buffer\nfor i in range(100000): o.write('\\u20ac'.encode())\n" \
           "o.flush(); o.write(b'\\xe2'); o.flush(); time.sleep(0.05); o.write(b'\\x82\\xac'); o.flush()"
    process = shared.start(["python3", "-c", code])
    text = "".join(part for name, part in process.stream_text() if name == stream)
    assert text == "\u20ac" * 100001


@pytest.mark.vm
def test_case_031_streams_stay_separate_and_ordered(shared):
    code = "import os\nfor i in range(1, 2001): os.write(1 + i % 2, b'%d\\n' % i)"
    result = shared.exec(["python3", "-c", code])
    assert result.stdout == b"".join(b"%d\n" % i for i in range(2, 2001, 2))
    assert result.stderr == b"".join(b"%d\n" % i for i in range(1, 2001, 2))
    merged = shared.exec(["python3", "-c", code], merged=True)
    assert merged.stdout == b"".join(b"%d\n" % i for i in range(1, 2001)) and merged.stderr == b""


@pytest.mark.parametrize("tail,end", [("kill -9 $$", Signaled(9)), ("exit 3", Exited(3))])
@pytest.mark.vm
def test_case_032_last_bytes_before_the_end(shared, tail, end):
    def one(_):
        result = shared.run_shell(f"head -c 204800 /dev/zero; {tail}")
        return result.end == end and result.stdout_total == 204800 and len(result.stdout) == 204800

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(150)))


def test_case_034_floods_take_no_disk_and_bounded_memory(node, client):
    def size_of(folder):
        return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file() and p.name != "scratch.img")

    before = size_of(node.folder)
    boxes = [client.run_container(args()) for _ in range(6)]
    try:
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda b: b.run_shell("head -c 209715200 /dev/zero"), boxes))
        assert all(r.stdout_total == 200 * MIB and len(r.stdout) == MIB for r in results)
        assert size_of(node.folder) - before < 20 * MIB
    finally:
        for box in boxes:
            box.stop()


def read_until(process, pattern, seconds=10):
    """Reads a terminal until the pattern matches; returns everything read so far."""
    text = b""
    end = time.monotonic() + seconds
    for chunk in process.stream():
        text += chunk.data
        if re.search(pattern, text):
            return text
        assert time.monotonic() < end, text
    raise AssertionError(f"ended before {pattern!r}: {text!r}")


@pytest.mark.vm
def test_case_035_initial_size_and_resize(shared):
    code = "import signal,sys,os,fcntl,termios,struct\n" \
           "def size(*_):\n    r,c=struct.unpack('hh', fcntl.ioctl(0, termios.TIOCGWINSZ, b'1234'))\n" \
           "    os.write(1, b'size %d %d\\n' % (r, c))\n" \
           "signal.signal(signal.SIGWINCH, size); size()\nwhile True: signal.pause()"
    process = shared.pty(["python3", "-c", code], rows=40, cols=100)
    read_until(process, rb"size 40 100")
    process.resize(10, 33)
    read_until(process, rb"size 10 33")
    for i in range(100):
        process.resize(20 + i % 5, 80)
    process.resize(11, 44)
    read_until(process, rb"size 11 44")
    process.cancel()


@pytest.mark.vm
def test_case_036_terminal_control_on_a_plain_exec(shared):
    process = shared.start(["cat"], stdin_open=True)
    with pytest.raises(errors.DSecError) as caught:
        process.resize(10, 10)
    assert caught.value.reason == "exec.no_tty"
    process.write(b"x\x04y")
    process.close_stdin()
    result = process.wait()
    assert result.end == Exited(0) and result.stdout == b"x\x04y"


def test_case_038_shell_ends_while_a_job_holds_the_terminal(shared):
    started = time.monotonic()
    process = shared.pty(["sh", "-c", "sleep 300 & exit 3"])
    assert process.wait().end == Exited(3)
    assert time.monotonic() - started < 3


def test_pty_runs_an_interactive_shell(shared):
    process = shared.pty(["sh", "-i"])
    process.write("echo mark-$((40+2)); exit 4\n")
    read_until(process, rb"mark-42")
    assert process.wait().end == Exited(4)
