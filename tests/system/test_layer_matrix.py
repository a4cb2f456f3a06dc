# SPDX-License-Identifier: Apache-2.0
"""Composition: every base with every workspace and every toolkit, and what an update of one toolkit touches."""

import itertools
import json
import os
import pathlib
import subprocess
import tempfile

import pytest

import support
from support import DSEC, Node, args

SHOW = """#include <fcntl.h>
#include <unistd.h>
int main(int n, char** names) {
  char text[4096];
  for (int i = 1; i < n; ++i) {
    const int file = open(names[i], O_RDONLY);
    const ssize_t size = file < 0 ? -1 : read(file, text, sizeof text);
    if (size < 0 || write(1, text, (size_t)size) != size) return 1;
  }
  return 0;
}
"""
BASES = ["base:1", "base:2", "base:3"]
WORKSPACES = ["work:1", "work:2", "work:3"]
TOOLKITS = ["kit-a:1", "kit-b:1", "kit-c:1"]
EROFS_MAGIC = "e0f5e1e2"


@pytest.fixture(scope="module")
def folder():
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces, mounts and cgroups")
    made = pathlib.Path(tempfile.mkdtemp(prefix="dsec-matrix-"))
    yield made
    support.remove_tree(made)


class Store:
    def __init__(self, folder):
        self.folder = folder
        self.root = folder / "layers"
        (folder / "show.c").write_text(SHOW, encoding="ascii")
        subprocess.run(["clang-19", "-static", "-O1", "-o", folder / "show", folder / "show.c"], check=True)

    def run(self, *words):
        done = subprocess.run([DSEC, "--json", "layer", *words, "--layers", self.root], capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def build(self, kind, name, path, text, program=False):
        """A layer with the file `path`; a base with the program that shows files as well."""
        tree = self.folder / "tree"
        target = tree / path
        target.parent.mkdir(parents=True)
        target.write_text(text, encoding="ascii")
        if program:
            (tree / "bin").mkdir()
            os.link(self.folder / "show", tree / "bin" / "show")
        layer = self.run("build", "--kind", kind, "--name", name, "--from-dir", tree)
        support.remove_tree(tree)
        return layer["id"]

    def names(self):
        return {name: layer["id"] for layer in self.run("ls")["layers"] for name in layer["names"]}

    def files(self):
        """Every file of every layer: (inode, mtime, size)."""
        found = {}
        for path in (self.root / "blobs").glob("*/*"):
            status = path.lstat()
            found[str(path.relative_to(self.root / "blobs"))] = (status.st_ino, status.st_mtime_ns, status.st_size)
        return found


def mounts(node):
    """The layers that the daemon holds mounted: (device, mount id) of each root of an EROFS. They are in no mount table."""
    found = set()
    for fd in os.listdir(f"/proc/{node.process.pid}/fd"):
        path = f"/proc/{node.process.pid}/fd/{fd}"
        try:
            if os.readlink(path) != "/":
                continue
            kind = subprocess.run(["stat", "-f", "-L", "-c", "%t", path], capture_output=True, text=True).stdout.strip()
            if kind == EROFS_MAGIC:
                text = pathlib.Path(f"/proc/{node.process.pid}/fdinfo/{fd}").read_text(encoding="ascii")
                found.add((os.stat(path).st_dev, text.split("mnt_id:")[1].split()[0]))
        except FileNotFoundError:
            continue
    return found


def devices(node):
    return {device for device, _ in mounts(node)}


def show(box, toolkit):
    path = f"/opt/{toolkit.split(':')[0]}/version"
    return box.exec(["/bin/show", "/base/name", "/work/name", path]).text


def create(client, base, workspace, toolkit):
    return client.run_container(args(container_image=base, workspace=workspace, toolkits=[toolkit], memory_limit_mb=32, disk_limit_mb=16))


@pytest.fixture(scope="module")
def store(folder):
    made = Store(folder)
    for name in BASES:
        made.build("base", name, "base/name", f"{name}\n", program=True)
    for name in WORKSPACES:
        made.build("workspace", name, "work/name", f"{name}\n")
    for name in TOOLKITS:
        made.build("toolkit", name, f"opt/{name.split(':')[0]}/version", f"{name} old\n")
    return made


@pytest.fixture()
def node(folder, store):
    made = Node(folder, store.root, "matrix").start()
    yield made
    made.stop()
    assert made.purge().returncode == 0


def test_update_of_a_toolkit_touches_one_layer_and_nothing_else(store, node):
    """The tag of one toolkit of three moves while every combination runs. New in the store are the files of one layer; new on the
    node is one mount; what runs keeps what it has; only what is made anew with that toolkit sees the new one."""
    moved = TOOLKITS[1]
    triples = list(itertools.product(BASES, WORKSPACES, TOOLKITS))
    with node.client() as client:
        boxes = {triple: create(client, *triple) for triple in triples}

        def check(version_of):
            for triple, box in boxes.items():
                base, workspace, toolkit = triple
                assert show(box, toolkit) == f"{base}\n{workspace}\n{toolkit} {version_of(triple)}\n", triple

        check(lambda _: "old")
        names, files, mounted = store.names(), store.files(), devices(node)
        assert len(names) == 9 and len(mounted) == 9, "each layer is mounted once for all that use it"

        new_id = store.build("toolkit", moved, f"opt/{moved.split(':')[0]}/version", f"{moved} new\n")

        assert store.names() == dict(names, **{moved: new_id}) and new_id != names[moved]
        now = store.files()
        assert {path: now.get(path) for path in files} == files
        hexes = {path.split("/")[0] for path in now.keys() - files.keys()}
        assert hexes == {new_id.split(":")[1]}
        assert devices(node) == mounted, "nothing is mounted before it is used"
        check(lambda _: "old")

        for triple in triples:
            if triple[2] == moved or triple[0] == BASES[0]:
                boxes.pop(triple).stop()
                boxes[triple] = create(client, *triple)
        check(lambda triple: "new" if triple[2] == moved else "old")
        assert len(devices(node) - mounted) == 1 and mounted <= devices(node)
        assert store.files() == now
        for box in boxes.values():
            box.stop()


def test_running_sandboxes_keep_the_old_toolkit_beside_the_new_one(store, node):
    """Two versions of one toolkit under one tag, over the same base and workspace, at once; also after the daemon was killed."""
    name = TOOLKITS[2]
    with node.client() as client:
        old = create(client, BASES[0], WORKSPACES[0], name)
        store.build("toolkit", name, f"opt/{name.split(':')[0]}/version", f"{name} newer\n")
        new = create(client, BASES[0], WORKSPACES[0], name)
        assert show(old, name).endswith(" old\n") and show(new, name).endswith(" newer\n")
        ids = [client.get(box.id).info["layer_ids"] for box in (old, new)]
        assert ids[0][:2] == ids[1][:2] and ids[0][2] != ids[1][2]
    node.kill()
    node.start()
    with node.client() as client:
        assert show(client.get(old.id), name).endswith(" old\n")
        assert show(client.get(new.id), name).endswith(" newer\n")
        client.delete(old.id)
        client.delete(new.id)
