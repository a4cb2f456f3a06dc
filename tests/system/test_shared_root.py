# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: layers on a cluster file system (MooseFS through FUSE) that is slow, hangs, fails and comes back."""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import pytest

import support
from support import BASE, DSEC, ROOT, args, sandbox, wait_until

sys.path.insert(0, str(ROOT / "tools" / "shared_root"))

from moosefs import MooseFs  # noqa: E402

MIB = 1 << 20
PATIENCE_MS = 3000
# A create that does not depend on the store; one that waits for it as long as the node lets it. Both with room to spare.
WARM_SECONDS = 20
COLD_SECONDS = 30


class Layers:
    """The store on the shared root, and workspace layers made for one test each."""

    def __init__(self, cluster, folder):
        self.cluster = cluster
        self.folder = pathlib.Path(folder)
        self.root = cluster.mnt / "layers"
        self.count = 0

    def build(self, kind, name, tree):
        done = subprocess.run([DSEC, "layer", "build", "--layers", self.root, "--kind", kind, "--name", name,
                               "--from-dir", tree], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr

    def workspace(self, size=8 * MIB):
        """(name, digest of /cold/data): a layer that nobody has read since the client was started anew."""
        self.count += 1
        tree = self.folder / f"tree{self.count}"
        (tree / "cold").mkdir(parents=True)
        data = os.urandom(size)
        (tree / "cold" / "data").write_bytes(data)
        (tree / "cold" / "number").write_text(f"{self.count}\n", encoding="ascii")
        name = f"cold:{self.count}"
        self.build("workspace", name, tree)
        support.remove_tree(tree)
        return name, hashlib.sha256(data).hexdigest()

    def blob(self, node, name):
        """The folder of a layer in the store."""
        shown = node.curl("GET", f"/v1/layers/{name}")
        assert shown[0] == 200, shown
        return self.root / "blobs" / shown[2]["id"].split(":")[1]


@pytest.fixture(scope="module")
def cluster():
    """A MooseFS cluster; afterwards no process, mount or folder of it is left."""
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces and mounts")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse: MooseFS mounts through FUSE")
    folder = tempfile.mkdtemp(prefix="dsec-moose-")
    made = MooseFs(folder)
    try:
        yield made.start()
    finally:
        made.stop()
        left = [line for line in pathlib.Path("/proc/self/mountinfo").read_text(encoding="ascii").splitlines() if folder in line]
        support.remove_tree(folder)
        assert left == []
        assert all(process.poll() is not None for process in made.processes)


@pytest.fixture(scope="module")
def store(cluster):
    """The layer store on the cluster, with the suites' base."""
    folder = tempfile.mkdtemp(prefix="dsec-moose-trees-")
    tree = ROOT / "build" / "demo" / "base"
    subprocess.run([ROOT / "tools" / "demo" / "build_base.sh", tree], check=True, stdout=subprocess.DEVNULL)
    made = Layers(cluster, folder)
    try:
        made.build("base", BASE, tree)
        yield made
    finally:
        support.remove_tree(folder)


@contextlib.contextmanager
def running_node(store, name, **config):
    """A node with its layers on the shared root; afterwards nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    made = support.Node(folder, store.root, name, layers_patience_ms=PATIENCE_MS, **config).start()
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()
        purged = made.purge()
        things = support.host_things(name)
        support.remove_tree(folder)
        assert purged.returncode == 0, purged.stderr
        assert things == []


@pytest.fixture()
def node(store, request):
    """A node of its own for each test."""
    with running_node(store, "sr" + "".join(c for c in request.node.name if c.isalnum())[-18:].lower()) as made:
        yield made


@pytest.fixture()
def client(node):
    """An open client of the node."""
    with node.client() as made:
        yield made


@contextlib.contextmanager
def stopped(process):
    """SIGSTOP for the time of the block: the server is there and does not answer."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def create_once(node, seconds=COLD_SECONDS, **overrides):
    """One create without the SDK's repetitions: (seconds it took, status, body)."""
    body = dict(args(**overrides).to_wire(), request_id=uuid.uuid4().hex)
    started = time.monotonic()
    status, _, reply = node.curl("POST", "/v1/sandboxes", body, seconds=seconds)
    return time.monotonic() - started, status, reply


def digest(box, timeout=60):
    """SHA-256 of the layer's file as the sandbox reads it."""
    result = box.run_shell("sha256sum /cold/data", timeout=timeout)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().split()[0]


def copies(node):
    """The layers of which the node has a copy of its own."""
    return sorted(entry for entry in os.listdir(node.state / "layers_cache") if len(entry) == 64)


def test_case_113_sandboxes_run_from_a_shared_root(store, node, client):
    name, wanted = store.workspace()
    store.cluster.remount()
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
        assert box.run_shell("cat /cold/number; python3 -c 'print(1+1)'").stdout.split() == [str(store.count).encode(), b"2"]
    assert len(copies(node)) == 2
    for folder in copies(node):
        assert sorted(os.listdir(node.state / "layers_cache" / folder)) == ["manifest.json", "meta.erofs"]


def test_case_113_content_that_stalls_holds_nobody_else_up(store, node, client):
    read, wanted = store.workspace(32 * MIB)
    untouched = [store.workspace() for _ in range(4)]
    store.cluster.remount()
    with sandbox(client) as warm, sandbox(client, workspace=read) as cold:
        assert warm.run_shell("ls -R /usr | wc -l; python3 -c 'pass'; sha256sum /bin/sh", timeout=60).exit_code == 0
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            with stopped(store.cluster.chunkserver):
                reading = pool.submit(digest, cold, 300)
                creates = [pool.submit(create_once, node, workspace=name) for name, _ in untouched]
                for _ in range(5):
                    took, status, reply = create_once(node)
                    assert status == 201, reply
                    assert took < WARM_SECONDS
                    node.curl("DELETE", f"/v1/sandboxes/{reply['id']}")
                for create in creates:
                    took, status, reply = create.result()
                    assert took < COLD_SECONDS
                    assert status == 503, reply
                    assert reply["error"]["reason"] == "layer.unreachable"
                    assert reply["error"]["retriable"] is True
                assert not reading.done()
                # The next one is told at once: it does not wait for a call that hangs already.
                assert create_once(node, workspace=untouched[0][0])[1] == 503
                assert warm.run_shell("echo here").stdout == b"here\n"
            assert reading.result() == wanted
        for name, right in untouched:
            with sandbox(client, workspace=name) as box:
                assert digest(box) == right


def test_checked_content_needs_the_cluster_once(store):
    """With layers_verify: reads wait for a chunkserver that stalls, and what has come needs none."""
    name, wanted = store.workspace(16 * MIB)
    with running_node(store, "srchecked", layers_verify=True) as node, node.client() as client:
        store.cluster.remount()
        with sandbox(client, workspace=name) as box, concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert box.run_shell("sha256sum /bin/sh", timeout=60).exit_code == 0
            with stopped(store.cluster.chunkserver):
                reading = pool.submit(digest, box, 300)
                assert not concurrent.futures.wait([reading], timeout=2).done
            assert reading.result() == wanted
            with stopped(store.cluster.chunkserver):
                pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
                assert digest(box) == wanted


def test_case_113_server_that_dies_and_comes_back(store, node, client):
    name, wanted = store.workspace(32 * MIB)
    store.cluster.remount()
    with sandbox(client, workspace=name) as box, concurrent.futures.ThreadPoolExecutor(1) as pool:
        store.cluster.end(store.cluster.chunkserver)
        reading = pool.submit(digest, box, 300)
        took, status, reply = create_once(node)
        assert status == 201 and took < WARM_SECONDS, reply
        assert not reading.done()
        store.cluster.start_chunkserver()
        assert reading.result() == wanted
        with sandbox(client, workspace=name) as other:
            assert digest(other) == wanted


def test_case_113_content_that_does_not_come_gives_an_io_error(store, node, client):
    name, wanted = store.workspace(32 * MIB)
    store.cluster.unmount()
    store.cluster.mount(io_timeout=3)
    try:
        with sandbox(client, workspace=name) as box:
            # The programs are in the page cache, the file is not.
            assert box.run_shell("cat /cold/number; sha256sum /cold/number").exit_code == 0
            with stopped(store.cluster.chunkserver):
                failed = box.run_shell("cat /cold/data > /dev/null", timeout=120)
                assert failed.exit_code == 1
                assert b"Input/output error" in failed.stderr
            # MooseFS stays with an error for as long as the file is open, and the mount has it open: docs/shared_root.md.
            assert box.run_shell("cat /cold/number; ls /cold").exit_code == 0
        node.stop()
        node.start()
        with node.client() as fresh, sandbox(fresh, workspace=name) as box:
            assert digest(box) == wanted
    finally:
        store.cluster.remount()


def test_case_113_root_that_is_unmounted_and_comes_back(store, node, client):
    held, wanted = store.workspace()
    other, right = store.workspace()
    store.cluster.remount()
    with sandbox(client, workspace=held) as box:
        store.cluster.unmount()
        try:
            assert digest(box) == wanted  # its client lives on
            took, status, reply = create_once(node, workspace=held)
            assert status == 201 and took < WARM_SECONDS, reply
            took, status, reply = create_once(node, workspace=other)
            assert (status, reply["error"]["reason"]) == (503, "layer.unreachable")
            assert took < COLD_SECONDS
            assert list(store.cluster.mnt.iterdir()) == []  # nobody has made a store in its place
        finally:
            store.cluster.mount()
        for name, good in ((other, right), (held, wanted)):
            with sandbox(client, workspace=name) as again:
                assert digest(again) == good
        assert digest(box) == wanted


def test_case_113_client_that_dies_is_noticed_and_replaced(store, node, client):
    name, wanted = store.workspace()
    store.cluster.remount()
    with sandbox(client, workspace=name) as box:
        assert box.run_shell("cat /cold/number").exit_code == 0
        store.cluster.end(store.cluster.client)
        assert box.run_shell("cat /cold/data").exit_code != 0
        reply = wait_until(lambda: [r for r in [create_once(node, workspace=name)] if r[1] != 201], 30, "it is noticed")[0]
        assert (reply[1], reply[2]["error"]["reason"]) == (503, "layer.unreachable")
        store.cluster.remount()
        # The old mount cannot be saved; new sandboxes get a new one.
        with sandbox(client, workspace=name) as again:
            assert digest(again) == wanted


def test_case_113_node_starts_while_the_root_hangs(store, node, client):
    with sandbox(client, ttl=600) as box:
        assert box.run_shell("echo here").stdout == b"here\n"
        node.kill()
        with stopped(store.cluster.chunkserver), stopped(store.cluster.master):
            node.start()
            assert box.run_shell("echo again").stdout == b"again\n"
            took, status, reply = create_once(node)
            assert (status, reply["error"]["reason"]) == (503, "layer.unreachable")
            assert took < COLD_SECONDS
        with sandbox(client) as other:
            assert other.run_shell("echo new").stdout == b"new\n"


def erofs_devices(node):
    """Devices of the EROFS mounts that the daemon holds."""
    found = set()
    for entry in (pathlib.Path("/proc") / str(node.process.pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            status = os.stat(entry)
            magic = subprocess.run(["stat", "-f", "-c", "%t", entry], capture_output=True).stdout.strip()
            if magic == b"e0f5e1e2":
                found.add(status.st_dev)
    return found


def test_case_114_fifty_first_users_share_one_copy_and_one_mount(store, node, client):
    name, wanted = store.workspace(2 * MIB)
    store.cluster.remount()

    def use(_):
        box = client.run_container(args(workspace=name, memory_limit_mb=64, disk_limit_mb=64), timeout=120)
        return box, digest(box, 120)

    boxes = []
    try:
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            for box, found in pool.map(use, range(50)):
                boxes.append(box)
                assert found == wanted
        assert len(copies(node)) == 2
        assert len(erofs_devices(node)) == 2
    finally:
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda box: box.stop(), boxes))


def test_case_115_copies_go_only_when_nobody_uses_them(store):
    pinned, wanted = store.workspace()
    others = [store.workspace(64 * 1024) for _ in range(8)]
    store.cluster.remount()
    with running_node(store, "srevict", layers_cache_bytes=0) as node, node.client() as client:
        with sandbox(client, workspace=pinned) as box:
            held = copies(node)
            assert len(held) == 2
            for _ in range(2):
                for name, right in others:
                    with sandbox(client, workspace=name) as other:
                        assert digest(other) == right
                    assert set(held) <= set(copies(node))
                    assert len(copies(node)) <= 4
            assert digest(box) == wanted


@pytest.mark.parametrize("damage", ["flip", "truncate", "manifest", "missing"])
def test_case_115_damaged_copy_is_healed(store, node, client, damage):
    name, wanted = store.workspace(64 * 1024)
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
    [folder] = [node.state / "layers_cache" / entry for entry in copies(node)
                if entry == store.blob(node, name).name]
    good = {file.name: file.read_bytes() for file in folder.iterdir()}

    def harm():
        meta = folder / "meta.erofs"
        if damage == "flip":
            data = bytearray(good["meta.erofs"])
            data[len(data) // 2] ^= 0xFF
            meta.write_bytes(data)
        elif damage == "truncate":
            os.truncate(meta, 4096)
        elif damage == "manifest":
            (folder / "manifest.json").write_text("{}", encoding="ascii")
        else:
            meta.unlink()

    harm()  # while its mount is kept
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == good
    node.stop()
    harm()  # while no node runs
    node.start()
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == good


def test_case_115_damaged_store_gives_a_typed_error(store, node, client):
    name, wanted = store.workspace()
    folder = store.blob(node, name)
    good = (folder / "data.blob").read_bytes()
    os.truncate(folder / "data.blob", len(good) - 4096)
    _, status, reply = create_once(node, workspace=name)
    assert (status, reply["error"]["reason"]) == (500, "layer.corrupt")
    assert "data.blob" in reply["error"]["message"]
    (folder / "data.blob").write_bytes(good)
    meta = (folder / "meta.erofs").read_bytes()
    (folder / "meta.erofs").write_bytes(meta[:-1] + bytes([meta[-1] ^ 1]))
    _, status, reply = create_once(node, workspace=name)
    assert (status, reply["error"]["reason"]) == (500, "layer.corrupt")
    (folder / "meta.erofs").write_bytes(meta)
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
    # A node that has its copy does not read the store's any more.
    (folder / "meta.erofs").write_bytes(b"x" * len(meta))
    with sandbox(client, workspace=name) as box:
        assert digest(box) == wanted
