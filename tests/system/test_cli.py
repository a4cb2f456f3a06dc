# SPDX-License-Identifier: Apache-2.0
"""The command line against a real node."""

import json
import os
import pty
import re
import select
import subprocess
import time

import pytest

import support
from support import BASE, DSEC, wait_until


def test_run_passes_output_and_exit_code_on(node):
    done = node.cli("run", BASE, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1:]) == (7, b"out\n", [b"err"])
    assert json.loads(node.cli("ps", "--json").stdout)["sandboxes"] == []


def test_create_exec_ps_rm(node):
    created = json.loads(node.cli("create", BASE, "--memory", "128m", "--cpus", "0.5", "--label", "a=b", "--json").stdout)
    box = created["id"]
    assert created["limits"]["memory_bytes"] == 128 << 20 and created["limits"]["cpu_millis"] == 500
    assert node.cli("exec", box, "--", "sh", "-c", "exit 3").returncode == 3
    assert node.cli("exec", "-i", box, "--", "cat", input=b"hello").stdout == b"hello"
    assert node.cli("exec", box, "--", "no-such-program").returncode == 127
    assert node.cli("exec", box, "--", "/tmp").returncode == 126
    assert box.encode() in node.cli("ps").stdout
    assert node.cli("rm", box).returncode == 0
    missing = node.cli("exec", box, "--", "true")
    assert missing.returncode == 125 and b"ended" in missing.stderr


def test_cp_both_ways(node, tmp_path):
    box = json.loads(node.cli("create", BASE, "--json").stdout)["id"]
    (tmp_path / "f").write_bytes(os.urandom(100000))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("x")
    assert node.cli("cp", str(tmp_path / "f"), f"{box}:/tmp/f").returncode == 0
    assert node.cli("cp", f"{box}:/tmp/f", str(tmp_path / "g")).returncode == 0
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()
    assert node.cli("cp", str(tmp_path / "d"), f"{box}:/tmp/d").returncode == 0
    assert node.cli("cp", f"{box}:/tmp/d", str(tmp_path / "e")).returncode == 0
    assert (tmp_path / "e" / "x").read_text() == "x"
    node.cli("rm", box)


def test_logs_events_stats_doctor_top(node):
    box = json.loads(node.cli("create", BASE, "--json").stdout)["id"]
    started = node.cli("exec", "--detach", box, "--", "sh", "-c", "echo later")
    assert started.returncode == 0
    op = started.stdout.decode().strip()
    assert node.cli("logs", "--follow", box, op).stdout == b"later\n"
    assert b"created" in node.cli("events", box).stdout
    assert node.cli("stats", box).returncode == 0
    assert node.cli("top", "--once").returncode == 0
    doctor = node.cli("doctor")
    assert doctor.returncode == 0 and b"disk_quota" in doctor.stdout, doctor
    node.cli("rm", box)


def test_errors_name_the_reason(node):
    done = node.cli("run", "no:such", "--", "true")
    assert done.returncode == 125 and b"layer.not_found" in done.stderr
    done = node.cli("ps", "--no-such-flag")
    assert done.returncode != 0 and b"no-such-flag" in done.stderr


def test_shell_is_a_real_terminal(node):
    box = json.loads(node.cli("create", BASE, "--json").stdout)["id"]
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 99, 0, 0))
    env = dict(os.environ, DSEC_URL=node.url, DSEC_API_KEY=node.key, TERM="xterm")
    shell = subprocess.Popen([DSEC, "shell", box], stdin=follower, stdout=follower, stderr=follower, env=env,
                             start_new_session=True)
    os.close(follower)
    text = b""

    def expect(pattern, seconds=10):
        nonlocal text
        end = time.monotonic() + seconds
        while not re.search(pattern, text):
            assert time.monotonic() < end, text
            if select.select([leader], [], [], 0.2)[0]:
                text += os.read(leader, 65536)

    os.write(leader, b"stty size\n")
    expect(rb"33 99")
    os.write(leader, b"exit 5\n")
    wait_until(lambda: shell.poll() is not None, 10, "the shell ends")
    assert shell.returncode == 5
    os.close(leader)
    node.cli("rm", box)


def test_layer_verify_finds_a_damaged_byte_and_du_adds_up(tmp_path):
    tree, store = tmp_path / "tree", tmp_path / "store"
    tree.mkdir()
    (tree / "data").write_bytes(os.urandom(3 * support.MIB))
    (tree / "text").write_bytes(b"text")

    def layer(*words):
        return subprocess.run([support.DSEC, "--json", "layer", "--layers", store, *words], capture_output=True, timeout=60)

    built = json.loads(layer("build", "--kind", "workspace", "--name", "one:1", "--from-dir", tree).stdout)
    (tree / "text").write_bytes(b"other")
    layer("build", "--kind", "toolkit", "--name", "two:1", "--from-dir", tree, "--no-share")
    verified = layer("verify")
    assert verified.returncode == 0 and json.loads(verified.stdout)["damaged"] == 0, verified.stderr
    usage = json.loads(layer("du").stdout)
    assert len(usage["layers"]) == 2 and usage["unnamed_allocated_bytes"] == 0
    assert usage["blob_allocated_bytes"] == sum(item["blob_allocated_bytes"] for item in usage["layers"]) >= 6 * support.MIB
    assert [item["names"] for item in json.loads(layer("du", "--kind", "toolkit").stdout)["layers"]] == [["two:1"]]
    folder = store / "blobs" / built["id"].split(":")[1]
    for name, at in (("data.blob", 2 * support.MIB + 17), ("meta.erofs", 1024)):
        with open(folder / name, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        damaged = layer("verify", "two:1", "one:1")
        assert damaged.returncode == 125
        results = json.loads(damaged.stdout)
        assert [item["ok"] for item in results["layers"]] == [True, False]
        assert name in results["layers"][1]["error"]
        with open(folder / name, "r+b") as file:
            file.seek(at)
            file.write(byte)
    assert layer("verify", "one:1").returncode == 0
    with open(folder / "data.blob", "ab") as file:
        file.write(b"x")
    assert b"data.blob has" in layer("verify", "one:1").stdout
