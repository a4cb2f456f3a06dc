# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: processes, memory, disk, CPU."""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
import tempfile
import threading
import time

import pytest

import support
from libdsec import Exited, OomKilled, Signaled, SpawnError, Timeout, errors
from support import BASE, DSEC, MIB, args, sandbox, wait_until

ZOMBIES = "n=0; for s in /proc/[0-9]*/stat; do read -r l < $s 2>/dev/null && case \"$l\" in *') Z '*) n=$((n+1));; esac; done; echo $n"


def test_case_049_orphans_are_reaped(client):
    with sandbox(client, pids_limit=256) as box:
        box.exec(["python3", "-c", "import os\n"
                  "for i in range(3000):\n"
                  "    p = os.fork()\n"
                  "    if p == 0:\n"
                  "        if os.fork() == 0: os._exit(0)\n"
                  "        os._exit(0)\n"
                  "    os.waitpid(p, 0)\n"])
        for _ in range(50):
            box.run_shell("timeout 0.01 sleep 5; true")
        wait_until(lambda: box.run_shell(ZOMBIES).stdout == b"0\n", 5, "no zombie is left")
        wait_until(lambda: box.stats()["usage"]["pids"] <= 4, 5, "pids are back to the start")


def test_case_050_fork_bomb_is_contained(client):
    with sandbox(client) as bomb, sandbox(client) as other:
        running = bomb.start(script="f() { f | f & }; f; sleep 20", timeout=5)
        slowest = 0.0
        end = time.monotonic() + 4
        while time.monotonic() < end:
            started = time.monotonic()
            assert other.run_shell("echo ok").stdout == b"ok\n"
            slowest = max(slowest, time.monotonic() - started)
        assert slowest < 2
        assert bomb.stats()["usage"]["pids_denied"] > 0
        running.wait()
        started = time.monotonic()
        bomb.stop()
        assert time.monotonic() - started < 5


def test_case_051_process_limits_are_per_sandbox(client):
    script = "for i in $(seq {n}); do sleep 60 & done; jobs -p | wc -l"
    boxes = [client.run_container(args()) for _ in range(4)]
    try:
        for box in boxes:
            assert box.run_shell(script.format(n=200)).stdout == b"200\n"
        result = boxes[0].run_shell("bash -c '" + script.format(n=300) + "'", timeout=20)
        assert result.stdout != b"300\n" and boxes[0].stats()["usage"]["pids_denied"] > 0
        assert boxes[1].run_shell("echo ok").stdout == b"ok\n"
    finally:
        for box in boxes:
            box.stop()


@pytest.mark.parametrize("script,code", [("exit 5", 5), ("sleep 1", 0)])
def test_case_053_entrypoint_ends(client, script, code):
    box = client.run_container(args(entrypoint=["sh", "-c", script]))
    wait_until(lambda: box.refresh()["state"] == "stopped", 10, "the sandbox stops with its entrypoint")
    termination = box.info["termination"]
    assert termination["cause"] == "entrypoint_exit" and termination["exit_code"] == code
    assert termination["fault"] == ("none" if code == 0 else "workload")


def test_case_055_crash_dumps_leave_nothing(shared):
    started = time.monotonic()
    result = shared.run_shell("ulimit -c unlimited 2>/dev/null; cd /tmp; kill -SEGV $$")
    assert result.end == Signaled(11) and time.monotonic() - started < 2
    assert shared.run_shell("ls /tmp/core* 2>/dev/null | wc -l").stdout == b"0\n"


def test_case_056_oom_is_named_and_only_when_true(client):
    with sandbox(client, memory_limit_mb=128) as box:
        end = box.exec(["python3", "-c", "x = bytearray(10**9)"]).end
        assert isinstance(end, OomKilled) and end.limit_bytes == 128 * MIB, end
        assert box.run_shell("kill -9 $$").end == Signaled(9)
        assert box.run_shell("exit 137").end == Exited(137)
        assert box.stats()["usage"]["oom_kills"] >= 1


def test_case_057_child_is_the_victim_and_the_command_goes_on(client):
    with sandbox(client, memory_limit_mb=128) as box:
        script = "python3 -c 'x=bytearray(10**9)'; echo rc=$?; echo alive"
        result = box.run_shell(script)
        assert result.end == Exited(0) and result.stdout == b"rc=137\nalive\n" and result.oom_events >= 1
        assert isinstance(box.run_shell(script, group_kill=True).end, OomKilled)
        assert box.run_shell("echo ok").stdout == b"ok\n"


def test_case_059_agent_survives_memory_pressure(client):
    with sandbox(client, memory_limit_mb=256) as box:
        box.exec(["python3", "-c", "import os,time\n"
                  "for i in range(32):\n"
                  "    if os.fork() == 0:\n"
                  "        x = bytearray(30 << 20); time.sleep(3); os._exit(0)\n"
                  "time.sleep(3)\n"])
        started = time.monotonic()
        assert box.run_shell("echo ok").stdout == b"ok\n"
        assert time.monotonic() - started < 2


def test_case_060_tmpfs_is_bounded_and_shm_works(client):
    with sandbox(client, shm_size_mb=32) as box:
        result = box.run_shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=100 2>&1; stat -c %s /dev/shm/x")
        assert b"No space left" in result.stdout and int(result.stdout.split()[-1]) <= 32 * MIB
        box.run_shell("rm /dev/shm/x")
        assert box.exec(["python3", "-c", "import os\n"
                         "try:\n    for i in range(200000): open(f'/dev/shm/{i}', 'w').close()\n"
                         "except OSError as e: print(e.errno)"]).stdout == b"28\n"
        box.run_shell("find /dev/shm -type f -delete")
        code = "from multiprocessing import Pool\nif __name__ == '__main__':\n    print(sum(Pool(4).map(abs, range(10))))"
        assert box.exec(["python3", "-c", code]).stdout == b"45\n"
        assert box.stats()["usage"]["oom_kills"] == 0


def test_case_061_limits_have_a_default(client):
    from libdsec import DSecContainerRunArgs
    from support import BASE

    box = client.run_container(DSecContainerRunArgs(container_image=BASE))
    try:
        limits = box.info["limits"]
        assert all(limits[key] > 0 for key in ("memory_bytes", "cpu_millis", "pids", "disk_bytes", "disk_inodes", "shm_bytes",
                                               "open_files", "output_bytes"))
        count = limits["memory_bytes"] * 3
        assert isinstance(box.exec(["python3", "-c", f"x = bytearray({count})"]).end, OomKilled)
    finally:
        box.stop()


def test_case_061_visible_memory_matches_the_limit(shared):
    text = shared.run_shell("grep MemTotal /proc/meminfo; echo $DSEC_MEMORY_LIMIT_BYTES").stdout.split()
    assert int(text[1]) * 1024 == 256 * MIB and int(text[3]) == 256 * MIB


def test_case_063_disk_full_stays_inside(client):
    with sandbox(client, disk_limit_mb=64) as box:
        result = box.run_shell("dd if=/dev/urandom of=/data bs=1M count=400 2>&1; stat -c %s /data; sync")
        assert b"No space left" in result.stdout or b"quota exceeded" in result.stdout
        assert int(result.stdout.split()[-1]) <= 72 * MIB
        assert box.run_shell("echo ok").stdout == b"ok\n"
        assert box.files.stat("/data").size > 0
        box.files.remove("/data")
        wait_until(lambda: box.run_shell("echo again > /again && cat /again").stdout == b"again\n", 10, "space comes back")
        assert b"fallocate" not in box.run_shell("fallocate -l 10G /big 2>/dev/null; stat -c %b /big 2>/dev/null").stderr


def test_case_064_only_real_blocks_count(client):
    with sandbox(client, disk_limit_mb=64) as box:
        assert box.run_shell("truncate -s 1T /sparse && stat -c %s /sparse").stdout == b"1099511627776\n"
        result = box.exec(["python3", "-c", "import os\nf = os.open('/sparse', os.O_WRONLY)\nn = 0\n"
                           "try:\n    for i in range(300):\n        os.pwrite(f, os.urandom(1 << 20), i << 30); n += 1\n"
                           "    os.fsync(f)\nexcept OSError as e: print('stopped', e.errno)\nprint(n)"])
        assert b"stopped" in result.stdout, result


@contextlib.contextmanager
def small_disk(size):
    """A folder that is the root of an ext4 of its own, without project quota."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-test-"))
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    image.touch()
    os.truncate(image, size)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        yield disk
    finally:
        # The last descriptor of the scratch file system is closed by the kernel when it likes.
        wait_until(lambda: subprocess.run(["umount", disk], capture_output=True).returncode == 0, 20, f"{disk} is idle")
        support.remove_tree(folder)


@contextlib.contextmanager
def node_on(disk, layers, name, **config):
    """A node with its state on `disk`, and a client of it; afterwards nothing of it is on the host."""
    made = support.Node(disk, layers, name, **config)
    try:
        made.start()
        with made.client() as client:
            yield made, client
        made.stop()
    finally:
        if made.process is not None and made.process.poll() is None:
            made.kill()
        purged = made.purge()
    assert purged.returncode == 0, purged.stderr
    assert support.host_things(name) == []


def test_case_066_quota_that_cannot_be_enforced(layers):
    """Neither project quota nor the tool that makes a file system with quotas."""
    tool = shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    assert tool, "btrfs-progs is missing"
    with small_disk(256 * MIB) as disk:
        program = disk / "dsec-without-btrfs"
        program.write_text("#!/bin/sh -e\n"
                           f"exec unshare --mount sh -ec 'mount --bind /dev/null {tool}; exec {DSEC} \"$@\"' sh \"$@\"\n")
        program.chmod(0o755)
        with node_on(disk, layers, "noquota", program=program, disk_reserve_bytes=0) as (node, client):
            (quota,) = [item for item in client.node()["capabilities"] if item["name"] == "disk_quota"]
            assert (quota["used"], quota["ok"]) == ("none", False) and "btrfs-progs" in quota["detail"], quota
            doctor = node.cli("doctor")
            assert doctor.returncode == 0 and b"btrfs-progs" in doctor.stdout, doctor
            for limit in (100, None):  # what the node would take by default is a limit too
                with pytest.raises(errors.UnsupportedError) as caught:
                    client.run_container(args(disk_limit_mb=limit))
                assert (caught.value.reason, caught.value.field) == ("limit.unenforceable", "limits.disk_bytes")
            assert client.node()["live"] == 0 and list(client.list(include_ended=True)) == []


def test_case_067_node_disk_nearly_full(layers, tmp_path):
    with small_disk(2048 * MIB) as disk, node_on(disk, layers, "diskfull", scratch_bytes=1024 * MIB,
                                                 disk_reserve_bytes=256 * MIB) as (node, client):
        boxes = [client.run_container(args(memory_limit_mb=64)) for _ in range(3)]
        counting = boxes[0].start(script="while :; do echo x >> /beat; sleep 0.1; done")
        usage = shutil.disk_usage(disk)
        filler = disk / "filler"
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, usage.free - usage.total // 20)
        assert client.node()["scratch_free_bytes"] < 256 * MIB  # and creates go by no older reading

        started = time.monotonic()
        status, headers, body = node.curl("POST", "/v1/sandboxes", {"request_id": "late", "base": BASE})
        assert time.monotonic() - started < 1
        assert (status, body["error"]["reason"]) == (429, "capacity.disk") and headers["Retry-After"], body

        for box in boxes:
            written = box.run_shell("dd if=/dev/urandom of=/data bs=1M count=10 conv=fsync 2>/dev/null && stat -c %s /data")
            assert written.end == Exited(0) and int(written.stdout) == 10 * MIB, written
        beats = boxes[0].files.stat("/beat").size
        wait_until(lambda: boxes[0].files.stat("/beat").size > beats, 5, "what runs goes on")

        with open(tmp_path / "large", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 500 * MIB)
        started = time.monotonic()
        build = node.cli("layer", "build", "--layers", disk / "layers", "--kind", "workspace", "--name", "large:1",
                         "--from-dir", tmp_path)
        assert time.monotonic() - started < 2 and build.returncode == 125
        assert b"layer.no_space" in build.stderr and b"needs" in build.stderr, build.stderr
        assert int(build.stderr.split(b"needs ")[1].split()[0]) >= 500 * MIB
        assert os.listdir(disk / "layers" / "tmp") == []

        for box in boxes:
            started = time.monotonic()
            box.stop()
            assert time.monotonic() - started < 5 and box.refresh()["state"] == "stopped"
        with pytest.raises(errors.SandboxEndedError):
            counting.wait()
        assert client.node()["live"] == 0
        filler.unlink()
        with sandbox(client) as box:
            assert box.run_shell("echo ok > /data && cat /data").stdout == b"ok\n"


def test_case_068_undeletable_trees_are_deleted(node, client):
    box = client.run_container(args())
    box.exec(["python3", "-c", "import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')"], cwd="/tmp")
    box.run_shell("mkdir /tmp/closed; chmod 000 /tmp/closed; cd /tmp; touch $'a\\nb'; chattr +i $'a\\nb' 2>/dev/null; true",
                  shell="/bin/bash")
    started = time.monotonic()
    box.stop()
    assert time.monotonic() - started < 3
    wait_until(lambda: client.node()["scratch_free_bytes"] > 0 and box.refresh()["state"] == "stopped", 60, "gone")


def test_case_069_visible_cores_match_the_limit(shared):
    script = ("nproc; getconf _NPROCESSORS_ONLN; python3 -c 'import os; print(os.cpu_count())';"
              "grep -c ^processor /proc/cpuinfo; cat /sys/devices/system/cpu/online; grep -c '^cpu[0-9]' /proc/stat")
    assert shared.run_shell(script).stdout.split() == [b"1", b"1", b"1", b"1", b"0", b"1"]
    assert shared.run_shell("echo $DSEC_CPU_LIMIT_MILLIS").stdout == b"1000\n"


def test_case_072_throttling_and_cpu_time_are_reported(client):
    with sandbox(client, cpu_cores_limit=0.5) as box:
        result = box.run_shell("(while :; do :; done) & sleep 4; kill $!", timeout=20)
        spent = result.user_time + result.system_time
        assert 1.2 < spent < 2.8, result
        second = box.run_shell("true")
        assert second.user_time + second.system_time < 0.5
        assert box.stats()["usage"]["throttled_usec"] > 0


def test_case_072_cpu_time_of_a_killed_tree_is_counted(shared):
    result = shared.run_shell("(while :; do :; done) & (while :; do :; done)", timeout=2)
    assert result.end == Timeout(2000) and result.user_time + result.system_time > 1


def test_open_files_limit(client):
    with sandbox(client, open_files_limit=300) as box:
        assert box.run_shell("ulimit -n").stdout == b"300\n"


def test_spawn_at_the_pids_limit_is_typed(client):
    with sandbox(client, pids_limit=32) as box:
        hold = box.start(script="for i in $(seq 100); do sleep 60 & done 2>/dev/null; wait")
        wait_until(lambda: box.stats()["usage"]["pids_denied"] > 0, 10, "the limit is hit")
        end = box.exec(["true"]).end
        assert isinstance(end, SpawnError) or end == Exited(0)
        hold.cancel()
        wait_until(lambda: box.exec(["true"]).end == Exited(0), 5, "commands work again")
