# SPDX-License-Identifier: Apache-2.0
"""Packs of running sandboxes: through SDK and CLI, used elsewhere, and cut off by kill -9."""

import asyncio
import http.client
import json
import shutil
import tempfile

import pytest

import support
from libdsec import DSecClient, errors
from support import BASE, args, sandbox, wait_until

CHANGE = """set -e
mkdir -p /work/src && echo one > /work/src/a && ln /work/src/a /work/src/b && ln -s a /work/src/l
rm -f /etc/issue; echo changed >> /etc/passwd; mkdir /work/d; rm -rf /usr/share/doc
"""
LIST = """cd / && ls -AR work; cat work/src/a; tail -1 /etc/passwd; ls -d /usr/share/doc /etc/issue 2>/dev/null
stat -c '%n %a %u %g %y %F' work work/src work/d; stat -c '%n %a %u %g %h %s %y %N' work/src/*"""


def remove(node, *refs):
    for ref in refs:
        assert node.cli("layer", "rm", "--layers", node.layers, ref).returncode == 0


def test_pack_is_a_workspace_of_another_sandbox(node):
    with node.client() as client, sandbox(client) as box:
        assert box.run_shell(CHANGE).ok
        wanted = box.run_shell(LIST).stdout
        seen = []
        packed = box.pack_diff("packed:1", labels={"task": "7"}, on_progress=seen.append)
        assert seen and {"phase", "entries", "bytes", "total_bytes"} == set(seen[0])
        assert packed["layer"]["names"] == ["packed:1"] and packed["layer"]["labels"]["task"] == "7"
        assert packed["frozen_us"] < 10_000_000
        assert box.pack_diff()["layer"]["id"] == packed["layer"]["id"], "nothing has changed between"
        with sandbox(client, workspace="packed:1") as other:
            assert other.run_shell(LIST).stdout == wanted
        with pytest.raises(errors.ConflictError) as caught:
            box.pack_diff(canary_contents=[b"one\n"])
        assert caught.value.reason == "pack.canary" and "work/src/a" in str(caught.value)
        with pytest.raises(errors.InvalidArgumentError) as caught:
            box.pack_diff(kind="base")
        assert caught.value.field == "kind"
    remove(node, "packed:1")


def test_pack_async_one_at_a_time(node):
    async def run():
        async with DSecClient(node.url, node.key) as client:
            box = await client.run_container(args())
            assert (await box.run_shell("mkdir /work; head -c 60000000 /dev/urandom > /work/big")).ok
            results = await asyncio.gather(*(box.pack_diff() for _ in range(3)), return_exceptions=True)
            await box.stop()
            return results

    results = asyncio.run(run())
    good = [r for r in results if isinstance(r, dict)]
    assert good, results
    assert all(r.reason == "pack.under_way" for r in results if not isinstance(r, dict)), results
    remove(node, good[0]["layer"]["id"])


def test_cli_packs_and_flattens(node):
    with node.client() as client, sandbox(client) as box:
        assert box.run_shell("mkdir /w && echo 1 > /w/a && echo 1 > /w/b").ok
        made = node.cli("layer", "pack", box.id, "--name", "cli-pack:1", "--label", "k=v", "--json")
        assert made.returncode == 0, made.stderr
        first = json.loads(made.stdout)["layer"]
        assert first["names"] == ["cli-pack:1"] and first["labels"]["k"] == "v"
        refused = node.cli("layer", "pack", box.id, "--canary-path", "/w/*")
        assert refused.returncode != 0 and b'canary_paths[0] "/w/*"' in refused.stderr, refused.stderr
        with sandbox(client, workspace="cli-pack:1") as second:
            assert second.run_shell("rm /w/a && echo 2 > /w/c").ok
            made = node.cli("layer", "pack", second.id, "--name", "cli-pack:2", "--kind", "toolkit")
            assert made.returncode == 0 and made.stdout.startswith(b"sha256:"), made.stderr
        flat = node.cli("layer", "flatten", "--layers", node.layers, "cli-pack:1", "cli-pack:2", "--name", "cli-flat:1", "--json")
        assert flat.returncode == 0, flat.stderr
        with sandbox(client, workspace="cli-flat:1") as third:
            assert third.run_shell("cd /w && cat b c && ls").stdout == b"1\n2\nb\nc\n"
        whole = node.cli("layer", "flatten", "--layers", node.layers, BASE, "cli-flat:1", "--kind", "base", "--name", "cli-base:1")
        assert whole.returncode == 0, whole.stderr
        with sandbox(client, container_image="cli-base:1") as fourth:
            assert fourth.run_shell("cd /w && cat b c && ls").stdout == b"1\n2\nb\nc\n"
    remove(node, "cli-pack:1", "cli-pack:2", "cli-flat:1", "cli-base:1")


@pytest.mark.parametrize("point", ["sandbox.pack.frozen", "sandbox.pack.copied"])
def test_daemon_killed_in_a_pack_leaves_the_sandbox_running(layers, point):
    folder = tempfile.mkdtemp(prefix="dsec-pack-")  # paths of sockets are short
    node = support.Node(folder, layers, f"pack{point[-6:].strip('.')}").start(env={"DSEC_FAULTS": f"{point}=kill"})
    try:
        client = node.client()
        box = client.run_container(args())
        box.start(script="i=0; while sleep 0.05; do i=$((i+1)); echo $i > /tmp/new; mv /tmp/new /tmp/beat; done")
        assert box.run_shell("mkdir /work && echo x > /work/f").ok
        with pytest.raises(errors.InfrastructureError):
            box.pack_diff("killed:1")
        node.process.wait(20)
        node.process.stdout.close()
        node.start()
        client = node.client()
        box = client.get(box.id)
        first = int(box.files.read("/tmp/beat"))
        wait_until(lambda: int(box.files.read("/tmp/beat")) > first, 20, "the command goes on")
        packed = box.pack_diff("killed:1")
        assert packed["layer"]["names"] == ["killed:1"] and not packed["existed"]
        assert box.stop()["state"] == "stopped"
        remove(node, "killed:1")
    finally:
        node.stop()
        node.purge()
        shutil.rmtree(folder)


def test_client_that_leaves_ends_its_pack(layers):
    folder = tempfile.mkdtemp(prefix="dsec-pack-")
    node = support.Node(folder, layers, "packgone").start(env={"DSEC_FAULTS": "sandbox.pack.copied=delay:3s*1"})
    try:
        with node.client() as client, sandbox(client) as box:
            assert box.run_shell("mkdir /work && head -c 1000000 /dev/urandom > /work/f").ok
            connection = http.client.HTTPConnection(node.url.split("//")[1], timeout=60)
            connection.request("POST", f"/v1/sandboxes/{box.id}/pack", body=json.dumps({"name": "gone:1"}),
                               headers={"Authorization": f"Bearer {node.key}", "Content-Type": "application/json"})
            response = connection.getresponse()
            assert json.loads(response.readline())["type"] == "progress"
            with pytest.raises(errors.ConflictError) as caught:
                box.pack_diff("other:1")
            assert caught.value.reason == "pack.under_way"
            response.close()
            connection.close()

            def packed():
                try:
                    return box.pack_diff("other:1")
                except errors.ConflictError as error:
                    assert error.reason == "pack.under_way", error
                    return None

            again = wait_until(packed, 30, "the pack of the client that left has ended")
            assert not again["existed"], "the other one has published nothing"
            assert node.cli("layer", "show", "--layers", node.layers, "gone:1").returncode != 0
        remove(node, "other:1")
    finally:
        node.stop()
        node.purge()
        shutil.rmtree(folder)
