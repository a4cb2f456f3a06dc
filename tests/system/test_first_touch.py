# SPDX-License-Identifier: Apache-2.0
"""Traces of first reads on a cluster file system: recorded in one sandbox, read ahead for the next."""

import concurrent.futures
import contextlib
import http.client
import os
import pathlib
import re
import signal
import subprocess

import pytest

from support import BASE, DSEC, MIB, args, pause, sandbox, trace_instances, wait_until
from test_shared_root import (COLD_SECONDS, WARM_SECONDS, cluster, create_once, digest, running_node,  # noqa: F401
                              stopped, store)

PART = "dd if=/cold/data bs=64K skip=16 count=8 status=none"
LINE = b"cold/data\t1048576\t524288\n"


def metric(node, name):
    status, _, text = node.curl("GET", "/metrics", raw=True)
    assert status == 200
    return float(re.search(rf"^{name} (\S+)$", text.decode(), re.MULTILINE).group(1))


def read_ahead(node):
    return metric(node, "dsec_layers_prefetch_read_bytes_total")


def fetched(cluster_of):
    """Bytes that the present MooseFS client has handed to the kernel, its short replies included (proc(5), io, wchar)."""
    text = pathlib.Path(f"/proc/{cluster_of.client.pid}/io").read_text(encoding="ascii")
    return int(re.search(r"^wchar: (\d+)$", text, re.MULTILINE).group(1))


def instances(node):
    return trace_instances(node.node_id)


def trace(store, *words):  # noqa: F811
    return subprocess.run([DSEC, "layer", "--layers", store.root, "trace", *words], capture_output=True, timeout=60)


def record(client, name, script, **how):
    """Runs a script in a new sandbox over the layer and saves what it read: what the workspace's trace became."""
    with sandbox(client, workspace=name, record_first_touch=True) as box:
        assert box.info["record_first_touch"] is True
        assert box.run_shell(script).exit_code == 0
        touched = box.first_touch(save=True, **how)
    assert touched["lost"] == 0 and touched["truncated"] is False
    return touched["layers"][1]


def dies(node, method, path, body):
    """A request that the daemon does not survive; whether it answers first is chance."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        node.curl(method, path, body)
    assert node.process.wait(30) == -signal.SIGKILL
    node.process.stdout.close()


@pytest.fixture()
def node(store, request):  # noqa: F811
    name = "ft" + "".join(c for c in request.node.name if c.isalnum())[-18:].lower()
    with running_node(store, name) as made:
        yield made
        if made.process.poll() is None:
            assert instances(made) == []


@pytest.fixture()
def client(node):
    with node.client() as made:
        yield made


@contextlib.contextmanager
def cold_node(store, name, **config):  # noqa: F811
    """A node that has seen nothing, over a client of the cluster that has seen nothing."""
    store.cluster.remount()
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
    with running_node(store, name, **config) as made, made.client() as opened:
        yield made, opened


def test_trace_is_exact_and_read_ahead_before_it_is_asked_for(store, node, client):  # noqa: F811
    name, wanted = store.workspace()
    before = trace(store, "show", name)
    assert before.returncode != 0 and b"layer.no_trace" in before.stderr
    touched = record(client, name, PART + " > /dev/null", stop=True)
    assert (touched["saved"], touched["bytes"], touched["saved_bytes"]) == (True, 512 * 1024, 512 * 1024)
    assert trace(store, "show", name).stdout == LINE
    store.cluster.remount()
    with cold_node(store, "ftcold") as (other, opened):
        sent = fetched(store.cluster)
        with sandbox(opened, workspace=name) as box:
            # What else this shell needs is in the page cache before the server stops.
            assert box.run_shell("dd if=/cold/number bs=64K status=none | md5sum").exit_code == 0
            wait_until(lambda: metric(other, "dsec_layers_traced_total") >= 1, 30, "the trace is found")
            wait_until(lambda: metric(other, "dsec_layers_prefetch_waiting_bytes") == 0 and
                       read_ahead(other) >= 512 * 1024, 60, "it is read ahead")
            assert fetched(store.cluster) - sent >= 512 * 1024
            with stopped(store.cluster.chunkserver):
                assert box.run_shell(PART + " | md5sum", timeout=20).exit_code == 0
            assert digest(box) == wanted
    # Without a trace the same read has to wait for the server.
    for ref in (name, BASE):
        assert trace(store, "rm", ref).returncode == 0
    with cold_node(store, "ftnone") as (other, opened), sandbox(opened, workspace=name) as box:
        assert box.run_shell("dd if=/cold/number bs=64K status=none | md5sum").exit_code == 0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with stopped(store.cluster.chunkserver):
                reading = pool.submit(box.run_shell, PART + " | md5sum", timeout=120)
                pause(3)
                assert not reading.done()
            assert reading.result().exit_code == 0
        assert metric(other, "dsec_layers_traced_total") == 0


def test_recordings_merge_and_lay_out_a_layer(store, node, client, tmp_path):  # noqa: F811
    name, wanted = store.workspace()
    record(client, name, PART + " > /dev/null")
    merged = record(client, name, "dd if=/cold/data bs=4K count=1 status=none | md5sum", merge=True)
    assert merged["bytes"] == 4096 and merged["saved_bytes"] == 512 * 1024 + 4096
    shown = trace(store, "show", name)
    assert shown.stdout == LINE + b"cold/data\t0\t4096\n"
    (tmp_path / "first").write_bytes(shown.stdout)
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
        assert box.run_shell("echo x > /cold/new").exit_code == 0
        tree = tmp_path / "tree"
        box.download_dir("/cold", tree / "cold")
    store.build("workspace", "laid:1", tree)
    built = subprocess.run([DSEC, "layer", "build", "--layers", store.root, "--kind", "workspace", "--name", "laid:2",
                            "--from-dir", tree, "--no-share", "--first-touch", tmp_path / "first"], capture_output=True, timeout=120)
    assert built.returncode == 0 and b"first touch of" not in built.stderr, built.stderr
    blob = (store.blob(node, "laid:2") / "data.blob").read_bytes()
    assert blob[:512 * 1024] == (tree / "cold" / "data").read_bytes()[MIB:MIB + 512 * 1024]


def test_server_that_stalls_in_a_prefetch_delays_no_create(store, node, client):  # noqa: F811
    name, wanted = store.workspace(32 * MIB)
    other, right = store.workspace()
    record(client, name, "cat /cold/data > /dev/null")
    with cold_node(store, "ftstall", layers_prefetch_bytes_per_s=4 * MIB) as (slow, opened):
        with sandbox(opened) as warm:
            assert warm.run_shell("sha256sum /bin/sh; cat /dev/null").exit_code == 0
            with sandbox(opened, workspace=name) as box:
                wait_until(lambda: read_ahead(slow) > 0, 30, "it has begun")
                with stopped(store.cluster.chunkserver):
                    for _ in range(5):
                        took, status, reply = create_once(slow)
                        assert status == 201 and took < WARM_SECONDS, reply
                        slow.curl("DELETE", f"/v1/sandboxes/{reply['id']}")
                    took, status, reply = create_once(slow, workspace=other)
                    assert (status, reply["error"]["reason"]) == (503, "layer.unreachable")
                    assert took < COLD_SECONDS
                    assert warm.run_shell("echo here").stdout == b"here\n"
                assert digest(box, 120) == wanted
            with sandbox(opened, workspace=other) as box:
                assert digest(box) == right
            wait_until(lambda: metric(slow, "dsec_layers_prefetch_waiting_bytes") == 0, 30, "it ends with its layer")


def test_daemon_killed_in_recording_prefetch_and_save_leaves_nothing(store, node, client):  # noqa: F811
    name, wanted = store.workspace()
    with sandbox(client, workspace=name, record_first_touch=True, ttl=600) as box:
        assert box.run_shell(PART + " > /dev/null").exit_code == 0
        assert len(instances(node)) == 1
        node.kill()
        node.start()
        # Its sandbox runs on, over the mounts of its own; the recording is over.
        assert digest(box) == wanted
        wait_until(lambda: instances(node) == [], 30, "what recorded is gone")
        status, _, reply = node.curl("POST", f"/v1/sandboxes/{box.id}/first-touch", {"save": True})
        assert (status, reply["error"]["reason"]) == (409, "trace.not_recording")
    record(client, name, PART + " > /dev/null")
    node.stop()
    node.start(env={"DSEC_FAULTS": "layer.trace.before_rename=kill"})
    with node.client() as fresh, sandbox(fresh, workspace=name, record_first_touch=True, ttl=600) as box:
        assert box.run_shell("cat /cold/data > /dev/null").exit_code == 0
        dies(node, "POST", f"/v1/sandboxes/{box.id}/first-touch", {"save": True})
        node.start()
        assert trace(store, "show", name).stdout == LINE
    assert list((store.root / "tmp").iterdir()) == []
    node.stop()
    node.start(env={"DSEC_FAULTS": "layer.prefetch.before_read=kill"})
    dies(node, "POST", "/v1/sandboxes", dict(args(workspace=name).to_wire(), request_id="dies"))
    node.start()
    with node.client() as fresh, sandbox(fresh, workspace=name) as box:
        assert digest(box) == wanted
        assert trace(store, "show", name).stdout == LINE


def test_only_a_few_are_recorded_at_once(node, client):
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(sandbox(client, record_first_touch=True))
        _, status, reply = create_once(node, record_first_touch=True)
        assert (status, reply["error"]["reason"]) == (429, "trace.too_many")
    wait_until(lambda: instances(node) == [], 30, "the recordings are over")
    with sandbox(client) as plain:
        status, _, reply = node.curl("POST", f"/v1/sandboxes/{plain.id}/first-touch", {})
        assert (status, reply["error"]["reason"]) == (409, "trace.not_recording")
