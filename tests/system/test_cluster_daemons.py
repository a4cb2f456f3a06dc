# SPDX-License-Identifier: Apache-2.0
"""What passes between real daemons: etcd, one apiserver, two edges with real sandboxes, TLS between them."""

import os
import pathlib
import subprocess
import tempfile
import threading

import pytest

import cluster
import support
from libdsec import Exited, errors


@pytest.fixture(scope="module")
def town(layers):
    """The cluster of this module; afterwards nothing of it may be left on the host."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-cluster-"))
    made = Town(folder, layers)
    try:
        made.begin()
        yield made
    finally:
        made.end()
        support.remove_tree(folder)


class Town:
    """etcd, apiserver a1, edges ce1 and ce2."""

    def __init__(self, folder, layers):
        self.folder = folder
        self.layers = layers
        self.etcd = None
        self.api = None
        self.edges = []

    def begin(self):
        self.etcd = cluster.Etcd(self.folder / "etcd")
        ca_dir = self.folder / "ca"
        made = subprocess.run([support.DSEC, "cluster", "--ca-dir", ca_dir, "init", "--name", "town"],
                              capture_output=True, timeout=60, text=True)
        assert made.returncode == 0, made.stderr
        self.api = cluster.Apiserver(self.folder / "a1", "a1", self.layers, self.etcd.endpoint, ca_dir).start()
        for number in (1, 2):
            edge = self.new_edge(number, self.api.token())
            edge.start()
            self.edges.append(edge)

    def new_edge(self, number, token, **config):
        return cluster.Edge(self.folder / f"e{number}", f"ce{number}", number, self.layers,
                            [self.api.cluster_address], token, etcd=self.etcd.endpoint, **config)

    def edge_of(self, box):
        return next(edge for edge in self.edges if f"sb-{edge.node_id}-" in box.id)

    def end(self):
        failed = []
        for edge in self.edges:
            if edge.alive():
                try:
                    edge.stop()
                except subprocess.TimeoutExpired:
                    failed.append(f"{edge.node_id} did not stop:\n{edge.tail()}")
                    edge.kill()
            purged = edge.purge()
            if purged.returncode != 0:
                failed.append(purged.stderr)
            failed += support.host_things(edge.node_id)
        if self.api is not None and self.api.alive():
            self.api.stop()
        if self.etcd is not None:
            self.etcd.kill()
        mounts = pathlib.Path("/proc/self/mountinfo").read_text(encoding="ascii")
        failed += [line for line in mounts.splitlines() if str(self.folder) in line]
        assert failed == []


@pytest.fixture()
def client(town):
    made = town.api.client()
    yield made
    made.close()


@pytest.fixture()
def pair(town, client):
    """A sandbox on each of the two edges."""
    boxes, spare = {}, []
    try:
        for _ in range(40):
            box = client.run_container(support.args())
            node = town.edge_of(box).node_id
            if node in boxes:
                spare.append(box)
            boxes.setdefault(node, box)
            if len(boxes) == 2:
                break
        assert sorted(boxes) == ["ce1", "ce2"]
        for box in spare:
            box.stop()
        spare.clear()
        yield [boxes["ce1"], boxes["ce2"]]
    finally:
        for box in [*spare, *boxes.values()]:
            try:
                box.stop()
            except errors.DSecError:
                pass  # the test has ended it


def test_both_edges_are_joined(town):
    lines = town.api.cluster("nodes").stdout.splitlines()[1:]
    rows = {line.split()[0]: line.split() for line in lines}
    assert sorted(rows) == ["ce1", "ce2"]
    for edge in town.edges:
        assert rows[edge.node_id][1:3] == ["joined", "1"]
        support.wait_until(lambda edge=edge: edge.address in town.api.cluster("nodes").stdout, 20, "announced address")
        for name in ("identity.pem", "trusted.pem"):
            assert (edge.folder / "state" / "tls" / name).stat().st_mode & 0o777 == 0o600


def curl(town, method, path, body=None):
    """(status, reason of the error or None) of one raw call."""
    node = support.Node(town.api.folder, town.layers, "a1")
    node.url = town.api.url
    status, _, answer = node.curl(method, path, body)
    return status, answer.get("error", answer).get("reason") if isinstance(answer, dict) else None


def test_exec_and_files_on_each(pair):
    for box in pair:
        result = box.run_shell("echo over; echo there >&2; exit 3")
        assert result.end == Exited(3) and result.stdout == b"over\n" and result.stderr == b"there\n"
        data = os.urandom(3 * support.MIB + 17)
        box.files.write("/tmp/blob", data)
        assert box.files.read("/tmp/blob") == data
        assert box.files.stat("/tmp/blob").size == len(data)
        assert "blob" in [os.fsdecode(item.name) for item in box.files.list("/tmp")]


def test_large_output_comes_through(pair):
    result = pair[0].run_shell("head -c 900000 /dev/zero | tr '\\0' x")
    assert result.end == Exited(0) and result.stdout == b"x" * 900000


def test_output_is_streamed_and_stdin_written(pair):
    process = pair[1].start(["cat"], stdin_open=True)
    process.write(b"one\n")
    chunks = process.stream()
    assert next(chunks).data == b"one\n"
    process.write(b"two\n")
    process.close_stdin()
    assert b"".join(chunk.data for chunk in chunks) == b"two\n"
    assert process.wait().end == Exited(0)


def test_list_covers_both(client, pair):
    found = {box.id for box in client.list()}
    assert {box.id for box in pair} <= found


def test_pack_comes_through_the_edge(client, pair):
    box = pair[0]
    box.files.write("/work.txt", b"mine")
    packed = box.pack_diff(name="cluster-test:1")
    assert packed["layer"]["names"] == ["cluster-test:1"] if "layer" in packed else packed
    listed = [name for layer in client.layers() for name in layer["names"]]
    assert "cluster-test:1" in listed  # the apiserver's own catalogue, on the shared root


def test_errors_keep_their_reason(town, pair):
    assert curl(town, "GET", "/v1/sandboxes/sb-ce1-01h00000000000000000000000") == (404, "sandbox.not_found")
    assert curl(town, "GET", "/v1/sandboxes/sb-nowhere-01h00000000000000000000000") == (404, "sandbox.not_found")
    pair[0].stop()
    with pytest.raises(errors.SandboxEndedError) as caught:
        pair[0].run_shell("true")
    assert caught.value.reason == "sandbox.ended.user_stop"
    assert curl(town, "POST", "/v1/fn/call", {"type": "x"})[0] == 412  # calls over several nodes come later


def test_events_of_one(pair):
    types = [event["type"] for event in pair[1].events()]
    assert types[0] == "created"


def test_kill_of_the_apiserver_leaves_sandboxes_and_execs(town, pair):
    box = pair[0]
    process = box.start(script="for i in $(seq 1 40); do echo $i; sleep 0.1; done")
    chunks = process.stream()
    got = next(chunks).data
    town.api.kill()
    town.api.start()
    # The same client goes on at the same byte.
    got += b"".join(chunk.data for chunk in chunks)
    assert got.split() == [str(i).encode() for i in range(1, 41)]
    assert box.run_shell("echo still").stdout == b"still\n"


def test_kill_of_an_edge_is_unreachable_then_adopted(town, pair):
    box, other = pair
    edge = town.edge_of(box)
    box.files.write("/tmp/kept", b"kept")
    edge.kill()
    assert curl(town, "GET", f"/v1/sandboxes/{box.id}") == (503, "edge.unreachable")
    assert other.run_shell("echo on").stdout == b"on\n"  # the other node goes on
    edge.start()
    support.wait_until(lambda: curl(town, "GET", f"/v1/sandboxes/{box.id}")[0] == 200, 20, "the edge is back")
    assert box.files.read("/tmp/kept") == b"kept"
    assert edge.epoch() == (1, 0)


def test_kill_of_an_edge_under_a_stream(town, pair):
    box = pair[1]
    process = box.start(script="for i in $(seq 1 40); do echo $i; sleep 0.1; done")
    chunks = process.stream()
    got = next(chunks).data
    edge = town.edge_of(box)
    edge.kill()
    edge.start()
    got += b"".join(chunk.data for chunk in chunks)
    assert got.split() == [str(i).encode() for i in range(1, 41)]


def test_follower_of_a_killed_apiserver_has_vanished(town, pair):
    """An attached command dies with the last that followed it, also when that died with its apiserver."""
    box = pair[0]
    failed = []

    def follow():
        try:
            box.run_shell("echo $$ > /tmp/pid; exec sleep 300")
        except errors.DSecError as error:
            failed.append(error)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    support.wait_until(lambda: box.files.exists("/tmp/pid") and box.files.read("/tmp/pid"), 20, "the command runs")
    with town.api.client() as client:
        watched = client.get(box.id)
        assert any(item["running"] for item in watched.execs())
    town.api.kill()
    support.pause(8)  # the grace of the edge is 5 s, and nobody is there to attach again
    town.api.start()
    with town.api.client() as client:
        ended = [item for item in client.get(box.id).execs() if not item["running"]]
    assert any(item["result"].get("killed_by") == "disconnect" for item in ended), ended
    thread.join(60)


def test_store_away_leaves_what_runs(town, pair):
    town.etcd.kill()
    try:
        for box in pair:
            assert box.run_shell("echo without").stdout == b"without\n"
    finally:
        town.etcd.start()


def test_edge_starts_without_the_store_and_the_apiserver(town, pair):
    box = pair[0]
    edge = town.edge_of(box)
    edge.kill()
    town.api.kill()
    town.etcd.kill()
    try:
        edge.start()
    finally:
        town.etcd.start()
        town.api.start()
    assert box.run_shell("echo adopted").stdout == b"adopted\n"


def test_new_epoch_ends_what_was_before(town, client, pair):
    """A death that was declared: the node ends its sandboxes, also when it is killed in the middle, then joins."""
    box = pair[0]
    edge = town.edge_of(box)
    edge.kill()
    # As another machine of that name would: the id is free, and what had it before must be fenced.
    # The fence is cut by kill -9 after it has begun; the next start goes on with it before it serves.
    (edge.folder / "state" / "epoch").write_text("dsec-epoch 1\n1\n2\n", encoding="ascii")
    edge.spawn(env={"DSEC_FAULTS": "epoch.after_fence=kill"})
    edge.process.wait(60)
    edge.process.stdout.close()
    assert edge.process.returncode == -9
    assert edge.epoch() == (1, 2)
    edge.start()
    assert edge.epoch() == (2, 0)
    support.wait_until(lambda: [row for row in town.api.cluster("nodes").stdout.splitlines()
                                if row.split()[0] == edge.node_id and row.split()[2] == "2"], 20, "epoch 2 is known")
    with pytest.raises(errors.SandboxEndedError) as caught:
        box.run_shell("true")
    assert caught.value.reason == "sandbox.ended.node_lost"
    assert pair[1].run_shell("echo other").stdout == b"other\n"


def test_token_is_good_once(town):
    token = town.api.token("--id", "ce9")
    wrong = cluster.Edge(town.folder / "e8", "ce8", 8, town.layers, [town.api.cluster_address], token)
    assert "join.name" in wrong.refused()
    used = cluster.Edge(town.folder / "e1twin", "ce1", 9, town.layers, [town.api.cluster_address], town.api.token())
    assert "join.node_taken" in used.refused()
    stale = cluster.Edge(town.folder / "e7", "ce7", 7, town.layers, [town.api.cluster_address], token[:-1] + "0")
    assert "join.token" in stale.refused()
    for edge in (wrong, stale):
        assert edge.purge().returncode == 0
        assert support.host_things(edge.node_id) == []
