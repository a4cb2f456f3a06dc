# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the daemon at any moment loses no sandbox, no running command and no output."""

import concurrent.futures
import os
import random
import signal
import subprocess
import tempfile
import time

import pytest

import support
from libdsec import Exited, errors
from support import args, wait_until


def test_case_093_edge_crash_and_restart(node):
    with node.client() as client:
        boxes = [client.run_container(args(memory_limit_mb=64)) for _ in range(20)]
        running = [box.start(script=f"echo before-{i}; sleep 3; echo after-{i}; exit {i}") for i, box in enumerate(boxes)]
        sessions = [box.session("s") for box in boxes[:5]]
        for session in sessions:
            session.run("cd /tmp; export KEPT=1")
        ids = [box.id for box in boxes]
        ops = [process.op_id for process in running]
    node.kill()
    support.pause(1)
    started = time.monotonic()
    node.start()
    assert time.monotonic() - started < 10
    with node.client() as client:
        assert sorted(b.id for b in client.list()) == sorted(ids)
        for i, (box_id, op) in enumerate(zip(ids, ops)):
            box = client.get(box_id)
            result = box.attach(op).wait()
            assert result.end == Exited(i) and result.stdout == f"before-{i}\nafter-{i}\n".encode()
            assert box.run_shell("echo ok").stdout == b"ok\n"
        for box_id in ids[:5]:
            assert client.get(box_id).session("s").run("pwd; echo $KEPT").stdout == b"/tmp\n1\n"
        for box_id in ids:
            assert client.delete(box_id)["state"] == "stopped"


def test_same_op_id_never_runs_twice_over_a_crash(node):
    with node.client() as client:
        box = client.run_container(args())
        assert box.run_shell("echo x >> /tmp/count; wc -l < /tmp/count", op_id="once").stdout == b"1\n"
        box.start(script="sleep 2; echo x >> /tmp/count", op_id="twice")
        box_id = box.id
    node.kill()
    node.start()
    with node.client() as client:
        box = client.get(box_id)
        again = box.start(script="sleep 2; echo x >> /tmp/count", op_id="twice")
        again.wait()
        assert box.files.read("/tmp/count") == b"x\nx\n"
        with pytest.raises(errors.ConflictError) as caught:
            box.start(script="other", op_id="twice")
        assert caught.value.reason == "exec.op_id_reused"
        box.stop()


def test_kill_in_the_middle_of_creates_and_deletes(node):
    rng = random.Random(7)
    for round_number in range(5):
        with node.client() as client:
            keep = client.run_container(args(memory_limit_mb=64))

            def churn(number):
                try:
                    box = client.run_container(args(memory_limit_mb=64, labels={"round": str(round_number)}),
                                               request_id=f"churn-{round_number}-{number}", timeout=5)
                    if number % 2:
                        box.stop()
                except errors.DSecError:
                    pass

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                jobs = [pool.submit(churn, i) for i in range(16)]
                support.pause(rng.uniform(0.02, 0.4))
                node.kill()
                node.start()
                for job in jobs:
                    job.result()
        with node.client() as client:
            assert client.get(keep.id).run_shell("echo ok").stdout == b"ok\n"
            for box in client.list():
                if box.state == "running":
                    assert box.run_shell("echo ok").stdout == b"ok\n"
            for box in list(client.list()):
                client.delete(box.id)
            wait_until(lambda: client.node()["live"] == 0, 20, "nothing is live")


def test_agent_death_is_one_infrastructure_failure(node):
    with node.client() as client:
        box = client.run_container(args())
        marker = f"dsec-{node.node_id}/"
        victims = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cgroup", encoding="ascii") as file:
                    text = file.read()
                with open(f"/proc/{pid}/comm", encoding="ascii") as file:
                    comm = file.read()
            except OSError:
                continue
            if marker in text and "dsec-aeth" in comm:
                victims.append(int(pid))
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: box.refresh()["state"] == "failed", 10, "the death is noticed")
        assert box.info["termination"]["cause"] == "agent_died" and box.info["termination"]["fault"] == "infrastructure"
        with pytest.raises(errors.SandboxEndedError) as caught:
            box.run_shell("true")
        assert caught.value.infrastructure
        fresh = client.run_container(args())
        assert fresh.run_shell("echo ok").ok
        fresh.stop()


def test_case_092_reconciler_removes_what_nobody_owns(node):
    for hierarchy in ("memory", "pids", "unified"):
        orphan = f"/sys/fs/cgroup/{hierarchy}/dsec-{node.node_id}/s4000-9999"
        if os.path.isdir(os.path.dirname(orphan)):
            os.makedirs(orphan + ("/code" if hierarchy == "unified" else ""))
    other = "/sys/fs/cgroup/memory/dsec-someoneelse"
    os.makedirs(other, exist_ok=True)
    try:
        node.kill()
        node.start()
        wait_until(lambda: not [t for t in support.host_things(node.node_id) if "s4000-9999" in t], 60, "the orphans go")
        assert os.path.isdir(other)
    finally:
        os.rmdir(other)


def test_second_daemon_on_the_same_state_is_refused(node):
    second = subprocess.run([support.DSEC, "up", "--config", node.folder / "node.toml"], capture_output=True, timeout=20)
    assert second.returncode != 0 and b"lock" in second.stderr
    with node.client() as client:
        assert client.node()["node_id"] == node.node_id


def test_purge_leaves_the_host_as_it_was(layers):
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    node = support.Node(folder, layers, "purgetest").start()
    with node.client() as client:
        for _ in range(5):
            client.run_container(args(memory_limit_mb=64)).start(["sleep", "1000"])
    node.kill()
    done = node.purge()
    assert done.returncode == 0, done.stderr
    assert support.host_things("purgetest") == []
    support.remove_tree(folder)
