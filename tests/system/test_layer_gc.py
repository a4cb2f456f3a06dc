# SPDX-License-Identifier: Apache-2.0
"""Garbage collection of layers while nodes use them."""

import asyncio
import json
import pathlib
import subprocess
import tempfile

import pytest

import support
from libdsec import DSecClient, errors
from support import BASE, DSEC, Node, args


@pytest.fixture()
def folder():
    made = pathlib.Path(tempfile.mkdtemp(prefix="dsec-gc-"))  # short enough for sockets
    yield made
    support.remove_tree(made)


@pytest.fixture()
def store(folder):
    support.build_layers(folder / "layers")
    return folder / "layers"


@pytest.fixture()
def node(folder, store):
    made = Node(folder, store, "gcone").start()
    yield made
    made.stop()
    made.purge()


def layer(store, *words):
    """Runs `dsec layer ...` on the store; returns what it printed as JSON."""
    done = subprocess.run([DSEC, "--json", "layer", *words, "--layers", store], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def build_tool(store, folder, text):
    """A toolkit called tool:1 with one file; returns its id."""
    tree = folder / "tree"
    (tree / "opt").mkdir(parents=True, exist_ok=True)
    (tree / "opt" / "tool").write_text(text, encoding="ascii")
    return layer(store, "build", "--kind", "toolkit", "--name", "tool:1", "--from-dir", tree)["id"]


def collect(store):
    return layer(store, "gc", "--unnamed-for", "0", "--grace", "0")


def test_layer_that_lost_its_name_stays_while_a_sandbox_uses_it(store, node, folder):
    """The tag of a toolkit moves while a sandbox has the old one; the daemon dies and comes back. Collection takes the old one only
    when its last use is over."""
    old = build_tool(store, folder, "old\n")
    with node.client() as client:
        box = client.run_container(args(toolkits=["tool:1"]))
        new = build_tool(store, folder, "new\n")
        assert new != old
        report = collect(store)
        assert [(item["id"], item["by"]) for item in report["in_use"]] == [(old, "node gcone")]
        assert report["removed"] == []
    node.kill()
    assert [item["id"] for item in collect(store)["in_use"]] == [old]
    node.start()
    with node.client() as client:
        box = client.get(box.id)
        assert box.exec(["cat", "/opt/tool"]).text == "old\n"
        assert [item["id"] for item in collect(store)["in_use"]] == [old]
        with client.run_container(args(toolkits=["tool:1"])) as other:
            assert other.exec(["cat", "/opt/tool"]).text == "new\n"
        box.stop()
    shown = layer(store, "nodes")["nodes"]
    assert [(item["node"], item["layers"]) for item in shown] == [("gcone", 3)]
    node.stop()
    node.purge()
    assert layer(store, "nodes")["nodes"] == []
    report = collect(store)
    assert report["removed"] == [old]
    assert report["removed_bytes"] > 0
    assert report["deleted"] == 1
    assert layer(store, "du")["removed_allocated_bytes"] == 0
    assert layer(store, "show", "tool:1")["id"] == new
    assert layer(store, "show", BASE)


def test_node_that_was_forgotten_in_error_mounts_nothing_new(store, node, folder):
    """A node that an operator declared gone keeps what it runs, and new sandboxes of layers that it has not mounted fail by name."""
    build_tool(store, folder, "old\n")
    with node.client() as client:
        with client.run_container(args()) as box:
            layer(store, "forget", "gcone")
            with pytest.raises(Exception) as caught:
                client.run_container(args(toolkits=["tool:1"]), timeout=3)  # it may come back, so it is tried again
            assert caught.value.reason == "layer.lease_lost", caught.value
            assert box.exec(["true"]).ok
    done = subprocess.run([DSEC, "layer", "forget", "nobody", "--layers", store], capture_output=True)
    assert done.returncode != 0
    assert b"layer.no_lease" in done.stderr


def test_collection_through_a_node(store, node, folder):
    """The same through API, SDK and a CLI that is given the node and no store: it acts on the node's store."""
    old = build_tool(store, folder, "old\n")
    with node.client() as client:
        box = client.run_container(args(toolkits=["tool:1"]))
        build_tool(store, folder, "new\n")
        assert [item["node"] for item in client.layer_nodes()] == ["gcone"]
        report = client.collect_layers(unnamed_for=0, grace=0)
        assert report["removed"] == [] and report["in_use"] == [{"id": old, "by": "node gcone"}]
        box.stop()
        spare = layer(store, "build", "--kind", "toolkit", "--from-dir", folder / "tree", "--label", "k=v", "--name", "spare:1")["id"]
        assert spare != old
        (folder / "tree" / "opt" / "tool").write_text("third\n", encoding="ascii")
        third = layer(store, "build", "--kind", "toolkit", "--from-dir", folder / "tree")["id"]
        would = client.collect_layers(unnamed_for=0, grace=0, dry_run=True)
        assert third in would["removed"] and would["dry_run"]
        done = json.loads(node.cli("--json", "layer", "gc", "--unnamed-for", "0", "--grace", "0").stdout)
        assert third in done["removed"] and spare not in done["removed"]
        shown = node.cli("layer", "nodes")
        assert b"gcone" in shown.stdout, shown
        assert node.cli("layer", "forget", "nobody").returncode != 0
        assert b"layer.no_lease" in node.cli("layer", "forget", "nobody").stderr
        with pytest.raises(errors.NotFoundError) as caught:
            client.forget_layer_node("nobody")
        assert caught.value.reason == "layer.no_lease"
        with pytest.raises(errors.InvalidArgumentError):
            client.collect_layers(unnamed_for=-1)
        client.forget_layer_node("gcone")
        assert client.layer_nodes() == []


def test_collection_through_the_asynchronous_client(store, node):
    async def run():
        async with DSecClient(node.url, node.key) as client:
            return await client.collect_layers(dry_run=True), await client.layer_nodes()

    report, nodes = asyncio.run(run())
    assert report["removed"] == [] and report["dry_run"]
    assert [item["node"] for item in nodes] in ([], ["gcone"])


def test_store_that_is_named_goes_before_the_node(store, node, folder):
    """`--layers` names another store than that of the node which DSEC_URL names."""
    other = folder / "other"
    tree = folder / "tree2"
    tree.mkdir()
    unnamed = layer(other, "build", "--kind", "toolkit", "--from-dir", tree)["id"]
    here = json.loads(node.cli("--json", "layer", "gc", "--unnamed-for", "0").stdout)
    assert here["removed"] == []
    there = json.loads(node.cli("--json", "layer", "gc", "--unnamed-for", "0", "--layers", other).stdout)
    assert there["removed"] == [unnamed]
