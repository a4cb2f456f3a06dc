# SPDX-License-Identifier: Apache-2.0
"""Compressed layers on a real node: what sandboxes over them see, and the commands that make them."""

import json
import os
import pty
import select
import subprocess

import pytest

import support
from support import BASE, DSEC, args, sandbox

LIST = """cd / && find bin lib sbin usr opt -xdev -type f -print0 2>/dev/null | sort -z | xargs -0 sha256sum | sha256sum
find bin lib sbin usr opt -xdev -printf '%p %y %m %U %G %s %T@ %l\\n' | sort | sha256sum"""


@pytest.fixture(scope="module")
def store(node):
    """The store of the module's node, without what this module adds to it."""
    yield node.layers
    for name in ("packed-base:1", "packed-work:1", "plain-work:1", "packed-flat:1", "packed-pack:1"):
        subprocess.run([DSEC, "layer", "rm", name, "--layers", node.layers], capture_output=True)


def layer(store, *words, code=0):
    done = subprocess.run([DSEC, "--json", "layer", *words, "--layers", store], capture_output=True, timeout=170)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr.decode()


@pytest.fixture(scope="module")
def packed_base(store):
    made = layer(store, "compress", BASE, "--name", "packed-base:1")
    return made, layer(store, "show", BASE)


@pytest.fixture(scope="module")
def workspaces(store, tmp_path_factory):
    """The same tree plain and compressed."""
    tree = tmp_path_factory.mktemp("work")
    (tree / "opt" / "src").mkdir(parents=True)
    for number in range(300):
        text = "".join(f"line {number * line} of file {number}\n" for line in range(number * 7))
        (tree / "opt" / "src" / f"{number}.txt").write_text(text, encoding="ascii")
    (tree / "opt" / "noise").write_bytes(os.urandom(200_000))
    return [layer(store, "build", "--kind", "workspace", "--name", f"{name}-work:1", "--from-dir", tree, *flags)
            for name, flags in (("plain", ()), ("packed", ("--compress", "lz4hc:9")))]


def test_doctor_has_read_a_compressed_layer(node):
    with node.client() as client:
        rows = {row["name"]: row for row in client.node()["capabilities"]}
    assert rows["erofs_lz4"]["ok"] and "compressed layers" in rows["erofs_lz4"]["detail"]


def test_sandbox_over_compressed_layers_sees_the_plain_ones(node, packed_base, workspaces):
    packed, plain = packed_base
    assert packed["content_bytes"] == plain["content_bytes"] and packed["entries"] == plain["entries"]
    assert packed["blob_bytes"] < 0.7 * plain["blob_bytes"], "programs and texts compress"
    assert packed["labels"]["dsec.compressed"].startswith("lz4hc:9 liblz4:")
    assert packed["labels"]["dsec.compress.layer"] == plain["id"]
    assert workspaces[1]["blob_bytes"] < workspaces[0]["blob_bytes"]
    seen = []
    with node.client() as client:
        for base, work in ((BASE, "plain-work:1"), ("packed-base:1", "packed-work:1")):
            with sandbox(client, container_image=base, workspace=work) as box:
                done = box.run_shell(LIST)
                assert done.ok, done
                seen.append(done.stdout)
                assert box.run_shell("echo x >> /opt/src/299.txt && tail -n 1 /opt/src/299.txt").stdout == b"x\n"
    assert seen[0] == seen[1]
    for ref in ("packed-base:1", "packed-work:1"):
        assert layer(node.layers, "verify", ref)["layers"][0]["ok"]


def test_pack_and_flatten_over_compressed_layers(node, store, packed_base, workspaces):
    with node.client() as client, sandbox(client, container_image="packed-base:1", workspace="packed-work:1") as box:
        assert box.run_shell("rm /opt/src/7.txt && echo new > /opt/src/8.txt && echo more >> /opt/src/299.txt").ok
        listed = "cd /opt && find . -type f | sort | xargs sha256sum"
        wanted = box.run_shell(listed).stdout
        box.pack_diff("packed-pack:1")
        plain = layer(store, "flatten", "plain-work:1", "packed-pack:1")
        flat = layer(store, "flatten", "packed-work:1", "packed-pack:1", "--name", "packed-flat:1", "--compress", "lz4hc:3")
        assert layer(store, "compress", flat["id"], "--method", "none")["id"] == plain["id"]
        with sandbox(client, workspace="packed-flat:1") as other:
            assert other.run_shell(listed).stdout == wanted
    subprocess.run([DSEC, "layer", "rm", plain["id"], "--layers", store], check=True, capture_output=True)


def test_bad_methods_are_refused_by_name(store):
    for word in ("zstd", "lz4hc:1", "lz4hc:99", ""):
        assert "layer.bad_compression" in layer(store, "compress", BASE, "--method", word, code=125)
    assert "layer.not_found" in layer(store, "compress", "nobody:1", code=125)


def test_compress_and_flatten_show_their_progress(store, workspaces):
    """On a terminal a line says how far they are; it is gone at the end."""
    for words in (("compress", "packed-work:1", "--method", "lz4hc:12"), ("flatten", "plain-work:1", "packed-work:1", "--compress", "lz4hc:4")):
        master, slave = pty.openpty()
        process = subprocess.Popen([DSEC, "layer", *words, "--layers", store], stdout=subprocess.PIPE, stderr=slave)
        os.close(slave)
        text = b""
        while select.select([master], [], [], 120)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # its last user has closed it
                break
            if not piece:
                break
            text += piece
        os.close(master)
        made = process.stdout.read().decode().strip()
        process.stdout.close()
        assert process.wait(60) == 0, text
        assert b"reading: " in text and b"entries" in text, text
        assert text.rstrip().splitlines()[-1].rsplit(b"\x1b[K", 1)[-1].startswith(b"built: ")
        layer(store, "show", made)
        subprocess.run([DSEC, "layer", "rm", made, "--layers", store], check=True, capture_output=True)
