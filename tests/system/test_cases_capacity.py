# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases on a node with room for four sandboxes: no capacity, slots, a hung helper."""

import concurrent.futures
import os
import pathlib
import signal
import threading
import time

import pytest

from libdsec import errors
from support import args, pause, wait_until

NODE_CONFIG = {"capacity": 4}


@pytest.fixture()
def full(client):
    """Four sandboxes: the node is full."""
    boxes = [client.run_container(args(memory_limit_mb=64)) for _ in range(4)]
    yield boxes
    for box in boxes:
        box.stop()


def test_case_097_no_capacity_is_an_answer(client, full):
    started = time.monotonic()
    with pytest.raises(errors.NoCapacityError) as caught:
        client.run_container(args(memory_limit_mb=64), timeout=0.2)
    assert caught.value.reason.startswith("capacity.") and caught.value.http_status == 429
    assert time.monotonic() - started < 3
    made = []
    waiting = threading.Thread(target=lambda: made.append(client.run_container(args(memory_limit_mb=64), timeout=20)))
    waiting.start()
    pause(1)
    assert not made
    full.pop().stop()
    waiting.join(15)
    assert made and made[0].exec(["true"]).ok
    full.append(made[0])


def test_no_capacity_is_told_within_the_time_of_the_call(client, full):
    started = time.monotonic()
    with pytest.raises(errors.NoCapacityError):
        client.run_container(args(memory_limit_mb=64), timeout=3)
    assert 1.5 < time.monotonic() - started < 3.5


def test_case_091_slots_come_back(client):
    def cycle(_):
        box = client.run_container(args(memory_limit_mb=64), timeout=30)
        ok = box.exec(["true"]).ok
        box.stop()
        return ok

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(cycle, range(60)))
    wait_until(lambda: client.node()["live"] == 0, 10, "all slots are back")


def test_case_098_failure_frees_capacity(node, client, full):
    agents = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            comm = pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="ascii")
            groups = pathlib.Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
        except OSError:
            continue
        if f"dsec-{node.node_id}/" in groups and "dsec-aeth" in comm:
            agents.append(int(pid))
    for pid in agents:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(box.refresh()["state"] == "failed" for box in full), 15, "the four fail")
    fresh = client.run_container(args(memory_limit_mb=64), timeout=20)
    assert fresh.exec(["true"]).ok
    fresh.stop()


def test_case_083_a_hung_helper_does_not_block_others(node, client):
    children = pathlib.Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text(encoding="ascii").split()
    for task in os.listdir(f"/proc/{node.process.pid}/task"):
        children += pathlib.Path(f"/proc/{node.process.pid}/task/{task}/children").read_text(encoding="ascii").split()
    spawners = {int(p) for p in children if "spawner" in pathlib.Path(f"/proc/{p}/comm").read_text(encoding="ascii")}
    assert len(spawners) == 1
    box = client.run_container(args(memory_limit_mb=64))
    (spawner,) = spawners
    os.kill(spawner, signal.SIGSTOP)
    try:
        assert box.run_shell("echo ok").stdout == b"ok\n"
        box.files.write("/tmp/x", b"1")
        started = time.monotonic()
        box.stop()
        assert time.monotonic() - started < 5
        assert client.node()["live"] == 0
    finally:
        os.kill(spawner, signal.SIGCONT)
    again = client.run_container(args(memory_limit_mb=64), timeout=30)
    assert again.exec(["true"]).ok
    again.stop()
