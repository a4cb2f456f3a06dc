# SPDX-License-Identifier: Apache-2.0
"""Layers of which each chunk is checked as it is read: from a store that is not trusted and from an object store over HTTP."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import pytest

import support
from support import BASE, DSEC, ROOT, args, sandbox, wait_until

sys.path.insert(0, str(ROOT / "tests"))

from http_blobs import BlobServer  # noqa: E402

MIB = 1 << 20
KIB = 1 << 10


class Store:
    """A store of its own, since tests damage it, with the suites' base."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.root = self.folder / "layers"
        self.count = 0
        tree = ROOT / "build" / "demo" / "base"
        subprocess.run([ROOT / "tools" / "demo" / "build_base.sh", tree], check=True, stdout=subprocess.DEVNULL)
        self.base = self.build("base", BASE, tree)

    def build(self, kind, name, tree):
        """The folder of the new layer."""
        done = subprocess.run([DSEC, "layer", "build", "--layers", self.root, "--kind", kind, "--name", name,
                               "--from-dir", tree, "--json"], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        shown = subprocess.run([DSEC, "layer", "show", name, "--layers", self.root, "--json"], capture_output=True, timeout=60)
        return self.root / "blobs" / json.loads(shown.stdout)["id"].split(":")[1]

    def workspace(self, **files):
        """(name, folder): a workspace with /cold/NAME of that many bytes, of which no two stores share any."""
        self.count += 1
        tree = self.folder / f"tree{self.count}"
        (tree / "cold").mkdir(parents=True)
        for name, size in files.items():
            (tree / "cold" / name).write_bytes(os.urandom(size))
        name = f"cold:{self.count}"
        return name, self.build("workspace", name, tree)

    def digest(self, name, file):
        data = (self.folder / f"tree{name.split(':')[1]}" / "cold" / file).read_bytes()
        return hashlib.sha256(data).hexdigest()

    def place(self, name, folder, file, offset=0):
        """Where in data.blob that byte of the file lies."""
        data = (self.folder / f"tree{name.split(':')[1]}" / "cold" / file).read_bytes()
        at = (folder / "data.blob").read_bytes().index(data[offset // 4096 * 4096 :][:4096])
        return at + offset % 4096


@pytest.fixture(scope="module")
def store():
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces and mounts")
    folder = tempfile.mkdtemp(prefix="dsec-vl-")
    try:
        yield Store(folder)
    finally:
        support.remove_tree(folder)


def ours(folder):
    """Processes of dsec-blobfs that serve the node in that folder."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if len(words) > 2 and words[0] == b"dsec-blobfs" and str(folder).encode() in words[2]:
                found[words[1].decode()] = int(pid)
    return found


@contextlib.contextmanager
def running_node(store, name, **config):
    """A node that checks; afterwards nothing of it is left."""
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    config.setdefault("layers_verify", True)
    connections = set(os.listdir("/sys/fs/fuse/connections"))
    limit = pathlib.Path("/proc/sys/fs/fuse/max_pages_limit").read_text(encoding="ascii")
    made = support.Node(folder, store.root, name, **config).start()
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop()
        purged = made.purge()
        things = support.host_things(name)
        left = ours(folder)
        dirs = sorted(os.listdir(made.state)) if made.state.exists() else []
        support.remove_tree(folder)
        assert purged.returncode == 0, purged.stderr
        assert things == [] and left == {}
        assert "blobfs" not in dirs and "layers_data" not in dirs
        wait_until(lambda: set(os.listdir("/sys/fs/fuse/connections")) <= connections, 10, "the session is gone")
        assert pathlib.Path("/proc/sys/fs/fuse/max_pages_limit").read_text(encoding="ascii") == limit


@pytest.fixture()
def name(request):
    return "vl" + "".join(c for c in request.node.name if c.isalnum())[-18:].lower()


@pytest.fixture()
def server(store):
    made = BlobServer(store.root)
    try:
        yield made
    finally:
        made.close()


def create_once(node, **overrides):
    """One create without the SDK's repetitions: (status, body)."""
    body = dict(args(**overrides).to_wire(), request_id=uuid.uuid4().hex)
    status, _, reply = node.curl("POST", "/v1/sandboxes", body, seconds=60)
    return status, reply


def digest(box, path="/cold/data", timeout=60):
    result = box.run_shell(f"sha256sum {path}", timeout=timeout)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().split()[0]


def metric(node, what):
    text = node.curl("GET", "/metrics", raw=True)[2].decode()
    lines = [line for line in text.splitlines() if line.startswith(what + " ")]
    return float(lines[0].split()[1]) if lines else 0.0


def forget_pages():
    """Neither layer of the page cache has anything of the tests."""
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


@pytest.mark.parametrize("way", ["store", "url"])
def test_a_checked_tree_equals_its_source(store, name, server, way):
    workspace, _ = store.workspace(data=5 * MIB + 123, small=10, empty=0)
    with running_node(store, name, layers_url=server.url if way == "url" else "") as node, node.client() as client:
        with sandbox(client, workspace=workspace) as box:
            listed = box.run_shell("cd / && find usr etc -xdev -type f -print0 | sort -z | xargs -0 sha256sum", timeout=150)
            assert listed.exit_code == 0, listed.stderr
            lines = listed.stdout.decode().splitlines()
            tree = ROOT / "build" / "demo" / "base"
            seen = 0
            for line in lines:
                wanted, path = line.split("  ", 1)
                if path in ("etc/hostname", "etc/hosts", "etc/resolv.conf"):
                    continue
                assert hashlib.sha256((tree / path).read_bytes()).hexdigest() == wanted, path
                seen += 1
            assert seen > 1000
            for file in ("data", "small", "empty"):
                assert digest(box, f"/cold/{file}") == store.digest(workspace, file)
        wait_until(lambda: metric(node, "dsec_layers_fetched_bytes_total") > 20 * MIB, 10, "counted")
        assert metric(node, "dsec_layers_wrong_digests_total") == 0
    if way == "url":
        ranges = [asked for path, asked, _ in server.requests if path.endswith("data.blob")]
        assert ranges and all(ranges), "content comes by ranges alone"
        assert server.sent < 400 * MIB


@pytest.mark.parametrize("way", ["store", "url"])
def test_a_shared_layer_is_checked_as_any_other(store, name, way):
    first, folder = store.workspace(data=5 * MIB, more=3 * MIB)
    tree = store.folder / f"tree{first.split(':')[1]}"
    (tree / "cold" / "own").write_bytes(os.urandom(2 * MIB + 7))
    second = f"cold:{store.count}-shared"
    shared = store.build("workspace", second, tree)
    assert (shared / "shared.1.blob").stat().st_nlink == 2 and not (shared / "data.blob").exists()
    target, exported = shared / "shared.1.blob", None
    if way == "url":
        exported = store.folder / f"exported-{name}"
        made = subprocess.run([DSEC, "layer", "export", second, BASE, "--layers", store.root, "--to", exported],
                              capture_output=True, timeout=120)
        assert made.returncode == 0, made.stderr
        target = exported / "blobs" / shared.name / "data.blob"
    served = BlobServer(exported) if exported else contextlib.nullcontext()
    url = {"layers_url": served.url} if exported else {}
    with served if exported is None else contextlib.closing(served):
        with running_node(store, name, **url) as node, node.client() as client:
            with sandbox(client, workspace=second) as box:
                for file in ("data", "more", "own"):
                    assert digest(box, f"/cold/{file}") == hashlib.sha256((tree / "cold" / file).read_bytes()).hexdigest()
    whole = bytearray(target.read_bytes())
    at = bytes(whole).index((tree / "cold" / "data").read_bytes()[2 * MIB :][:4096])
    whole[at + 9] ^= 1
    target.write_bytes(whole)
    served = BlobServer(exported) if exported else contextlib.nullcontext()
    url = {"layers_url": served.url} if exported else {}
    with served if exported is None else contextlib.closing(served):
        with running_node(store, name, **url) as node, node.client() as client, sandbox(client, workspace=second) as box:
            read = box.run_shell("cat /cold/data > /dev/null", timeout=60)
            assert read.exit_code != 0 and b"Input/output error" in read.stderr
            assert digest(box, "/cold/own") == hashlib.sha256((tree / "cold" / "own").read_bytes()).hexdigest()
    whole[at + 9] ^= 1
    target.write_bytes(whole)


def test_a_wrong_byte_is_an_error_and_never_read(store, name):
    workspace, folder = store.workspace(good=3 * MIB, bad=3 * MIB, data=MIB)
    at = store.place(workspace, folder, "bad", 2 * MIB + 77)
    blob = folder / "data.blob"
    whole = blob.read_bytes()
    blob.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    checked = subprocess.run([DSEC, "layer", "verify", workspace, "--layers", store.root], capture_output=True, timeout=60)
    assert checked.returncode != 0 and b"data.blob" in checked.stderr + checked.stdout
    with running_node(store, name) as node, node.client() as client, sandbox(client, workspace=workspace) as box:
        for _ in range(2):
            read = box.run_shell("cat /cold/bad > /tmp/bad; stat -c %s /tmp/bad", timeout=60)
            assert b"Input/output error" in read.stderr
            got = int(read.stdout.split()[0])
            assert got <= 2 * MIB
            same = box.run_shell(f"head -c {got} /cold/bad | cmp - /tmp/bad", timeout=60)
            assert same.exit_code == 0
        assert digest(box, "/cold/good") == store.digest(workspace, "good")
        assert digest(box) == store.digest(workspace, "data")
        wait_until(lambda: metric(node, "dsec_layers_wrong_digests_total") > 0, 10, "counted")
        assert b"layer.wrong_digest" in node.log.read_bytes()
        status, reply = create_once(node, workspace=workspace)
        assert (status, reply["error"]["reason"]) == (500, "layer.corrupt"), reply
        with sandbox(client) as other:
            assert other.run_shell("true").exit_code == 0
        # Put right, it is right again, for those that run as well.
        blob.write_bytes(whole)
        with sandbox(client, workspace=workspace) as again:
            assert digest(again, "/cold/bad") == store.digest(workspace, "bad")
        assert digest(box, "/cold/bad") == store.digest(workspace, "bad")


HUGE = """
import mmap, sys
with open('/cold/data', 'rb') as file:
    size = 8 << 20
    view = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ)
    view.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, 4096):
        if view[at:at + 4096] == bytes(4096):
            print('zeros at', at)
            sys.exit(3)
"""


def test_a_read_that_fails_half_way_gives_no_zeros(store, name):
    workspace, folder = store.workspace(data=8 * MIB)
    blob = folder / "data.blob"
    whole = bytearray(blob.read_bytes())
    for part in (1, 3, 5):
        whole[store.place(workspace, folder, "data", part * MIB + 300 * KIB)] ^= 1
    blob.write_bytes(whole)
    with running_node(store, name) as node, node.client() as client, sandbox(client, workspace=workspace) as box:
        for block in ("4k", "128k", "3M"):
            read = box.run_shell(f"dd if=/cold/data of=/tmp/out bs={block} conv=noerror,sync status=none; "
                                 "for i in 0 2 4 6 7; do dd if=/cold/data bs=1M count=1 skip=$i status=none | sha256sum; done",
                                 timeout=60)
            tree = (store.folder / f"tree{workspace.split(':')[1]}" / "cold" / "data").read_bytes()
            wanted = [hashlib.sha256(tree[i * MIB : (i + 1) * MIB]).hexdigest() for i in (0, 2, 4, 6, 7)]
            assert [line.split()[0].decode() for line in read.stdout.splitlines()] == wanted
        # The kernel reads 2 MiB at once for it.
        forget_pages()
        box.files.write("/tmp/huge.py", HUGE.encode())
        mapped = box.run_shell("python3 /tmp/huge.py", timeout=60)
        assert mapped.exit_code not in (0, 3), mapped  # SIGBUS


@pytest.mark.parametrize("fault", ["wrong", "error", "short", "whole", "elsewhere"])
def test_an_object_store_that_fails_serves_nothing_wrong(store, name, server, fault):
    workspace, folder = store.workspace(data=3 * MIB)
    server.only = folder.name
    with running_node(store, name, layers_url=server.url) as node, node.client() as client:
        with sandbox(client, workspace=workspace) as box, concurrent.futures.ThreadPoolExecutor(1) as pool:
            server.fault = fault
            reading = pool.submit(box.run_shell, "sha256sum /cold/data", timeout=120)
            read = reading.result()
            assert read.exit_code != 0 and b"Input/output error" in read.stderr
            server.fault = None
            wait_until(lambda: box.run_shell("cat /cold/data > /dev/null").exit_code == 0, 20, "it heals")
            assert digest(box) == store.digest(workspace, "data")


def test_a_server_that_hangs_stalls_its_readers_alone(store, name, server):
    cold, folder = store.workspace(data=4 * MIB)
    server.only = folder.name
    with running_node(store, name, layers_url=server.url) as node, node.client() as client:
        with sandbox(client) as warm, sandbox(client, workspace=cold) as box:
            assert warm.run_shell("python3 -c 'pass'; sha256sum /bin/sh").exit_code == 0
            assert box.run_shell("sha256sum /bin/sh; python3 -c 'pass'").exit_code == 0
            forget_pages()
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                server.hang()
                reading = pool.submit(digest, box)
                assert server.waiting.acquire(timeout=20)
                # From the local copy, in the same sandbox and another one, and creates go on.
                assert warm.run_shell("python3 -c 'pass'; sha256sum /bin/sh").exit_code == 0
                assert box.run_shell("python3 -c 'pass'").exit_code == 0
                with sandbox(client, workspace=cold) as third:
                    assert third.run_shell("echo here").stdout == b"here\n"
                    # A reader that hangs can be killed, and with it its sandbox.
                    killed = third.run_shell("timeout -s KILL 2 cat /cold/data", timeout=30)
                    assert killed.exit_code == 137
                assert not reading.done()
                server.release()
                assert reading.result() == store.digest(cold, "data")


def start_reading(box):
    """Begins to read /cold/data in the background; the digest comes to /tmp/sum."""
    begun = box.run_shell("(sha256sum /cold/data > /tmp/part; mv /tmp/part /tmp/sum) > /dev/null 2>&1 &")
    assert begun.exit_code == 0


def finish_reading(box):
    wait_until(lambda: box.run_shell("test -e /tmp/sum").exit_code == 0, 60, "the read is done")
    return box.run_shell("cat /tmp/sum").stdout.decode().split()[0]


@pytest.mark.parametrize("victims", ["daemon", "worker", "keeper", "worker keeper", "daemon worker", "daemon keeper"])
def test_kill_9_in_a_read_loses_nothing(store, name, server, victims):
    workspace, folder = store.workspace(data=4 * MIB)
    other, _ = store.workspace(data=2 * MIB)
    server.only = folder.name
    with running_node(store, name, layers_url=server.url) as node:
        with node.client() as client:
            box = client.run_container(args(workspace=workspace))
            server.hang()
            start_reading(box)
            assert server.waiting.acquire(timeout=20)
        before = ours(node.folder)
        assert set(before) == {"keeper", "worker"}
        for victim in reversed(victims.split()):  # the keeper first: it would start the worker again
            if victim == "daemon":
                node.kill()
            else:
                os.kill(before[victim], signal.SIGKILL)
        server.release()
        if "daemon" in victims:
            node.start()
        with node.client() as client:
            again = client.get(box.id)
            assert finish_reading(again) == store.digest(workspace, "data")
            with sandbox(client, workspace=other) as fresh:
                assert digest(fresh) == store.digest(other, "data")
            after = ours(node.folder)
            assert "worker" in after
            for victim in set(victims.split()) - {"daemon"}:
                assert victim == "keeper" or after[victim] != before[victim]
            again.stop()


def test_both_killed_with_the_daemon_is_an_error_and_over_with_a_new_sandbox(store, name):
    workspace, _ = store.workspace(data=4 * MIB)
    with running_node(store, name) as node:
        with node.client() as client:
            box = client.run_container(args(workspace=workspace))
            assert box.run_shell("head -c 10 /cold/data > /dev/null").exit_code == 0
        before = ours(node.folder)
        node.kill()
        os.kill(before["keeper"], signal.SIGKILL)
        os.kill(before["worker"], signal.SIGKILL)
        node.start()
        with node.client() as client:
            client.get(box.id).stop()
            with sandbox(client, workspace=workspace) as fresh:
                assert digest(fresh) == store.digest(workspace, "data")


def test_what_is_here_needs_no_server(store, name, server):
    workspace, _ = store.workspace(data=4 * MIB)
    with running_node(store, name, layers_url=server.url) as node:
        with node.client() as client, sandbox(client, workspace=workspace) as box:
            assert digest(box) == store.digest(workspace, "data")
            assert box.run_shell("sha256sum /bin/sh").exit_code == 0
            wait_until(lambda: metric(node, "dsec_layers_cache_bytes") >= 5 * MIB, 10, "kept")
        node.stop()
        wait_until(lambda: ours(node.folder) == {}, 10, f"with nothing to serve it ends with the daemon:\n{node.tail()}")
        server.close()
        forget_pages()
        node.start()
        with node.client() as client, sandbox(client, workspace=workspace) as box:
            assert digest(box) == store.digest(workspace, "data")
            # A damaged copy is as good as none: not served, and without the server not healed.
            copies = [path / "data" for path in (node.state / "layers_data").iterdir() if (path / "data").stat().st_blocks]
            assert len(copies) == 2


def test_ids_need_no_catalogue_and_credentials_go_along(store, name, server):
    workspace, folder = store.workspace(data=MIB)
    elsewhere = tempfile.mkdtemp(prefix="dsec-vl-")
    try:
        headers = pathlib.Path(elsewhere) / "headers"
        headers.write_text("Authorization: Bearer let-me-in\n", encoding="ascii")
        empty = type("Empty", (), {"root": pathlib.Path(elsewhere) / "layers"})
        with running_node(empty, name, layers_url=server.url, layers_url_headers_file=str(headers)) as node:
            with node.client() as client:
                by_id = dict(container_image=f"sha256:{store.base.name}", workspace=f"sha256:{folder.name}")
                with sandbox(client, **by_id) as box:
                    assert digest(box) == store.digest(workspace, "data")
                status, reply = create_once(node, container_image="sha256:" + "0" * 64)
                assert (status, reply["error"]["reason"]) == (404, "layer.not_found"), reply
        assert server.requests
        assert all(fields.get("Authorization") == "Bearer let-me-in" for _, _, fields in server.requests)
    finally:
        support.remove_tree(elsewhere)


def test_a_layer_without_digests_is_refused_with_what_to_do(store, name):
    workspace, folder = store.workspace(data=MIB)
    elsewhere = pathlib.Path(tempfile.mkdtemp(prefix="dsec-vl-"))
    try:
        # As it was built before there were digests.
        manifest = json.loads((folder / "manifest.json").read_text(encoding="ascii"))
        del manifest["blob"]["chunks"]
        manifest["format"] = 2
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        old = hashlib.sha256(text.encode("ascii")).hexdigest()
        shutil.copytree(store.base, elsewhere / "layers" / "blobs" / store.base.name)
        shutil.copytree(folder, elsewhere / "layers" / "blobs" / old)
        (elsewhere / "layers" / "blobs" / old / "manifest.json").write_text(text, encoding="ascii")
        (elsewhere / "layers" / "blobs" / old / "chunks.sha256").unlink()
        there = type("Store", (), {"root": elsewhere / "layers"})
        layers = dict(container_image=f"sha256:{store.base.name}", workspace=f"sha256:{old}")
        with running_node(there, name + "p", layers_verify=False) as node, node.client() as client:
            with sandbox(client, **layers) as box:
                assert digest(box) == store.digest(workspace, "data")
        with running_node(there, name) as node:
            status, reply = create_once(node, **layers)
            assert (status, reply["error"]["reason"]) == (412, "layer.unverifiable"), reply
            assert "dsec layer flatten" in reply["error"]["message"]
            flat = subprocess.run([DSEC, "layer", "flatten", "--layers", there.root, "--kind", "workspace", "--name", "flat:1", f"sha256:{old}"],
                                  capture_output=True, timeout=60)
            assert flat.returncode == 0, flat.stderr
            with node.client() as client, sandbox(client, **dict(layers, workspace="flat:1")) as box:
                assert digest(box) == store.digest(workspace, "data")
    finally:
        support.remove_tree(elsewhere)


def test_settings_that_change_are_taken_by_the_next_start(store, name):
    workspace, _ = store.workspace(data=2 * MIB)
    with running_node(store, name) as node:
        with node.client() as client:
            box = client.run_container(args(workspace=workspace))
        worker = ours(node.folder)
        node.kill()
        node.config["layers_data_cache_bytes"] = MIB
        node.start()
        with node.client() as client:
            assert ours(node.folder)["keeper"] == worker["keeper"]
            assert ours(node.folder)["worker"] != worker["worker"]
            again = client.get(box.id)
            assert digest(again) == store.digest(workspace, "data")
            wait_until(lambda: 0 < metric(node, "dsec_layers_cache_bytes") <= MIB, 10, "the bound holds")
            again.stop()
