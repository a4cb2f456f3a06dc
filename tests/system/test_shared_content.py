# SPDX-License-Identifier: Apache-2.0
"""Layers that have content in common, and images that are several layers: built, run, packed, removed and exported."""

import hashlib
import io
import json
import os
import pathlib
import subprocess
import tarfile

import pytest

import support
from support import BASE, DSEC, MIB, ROOT, sandbox

TREE = ROOT / "build" / "demo" / "base"


class Store:
    """A store of its own with two bases that differ in little."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.root = self.folder / "layers"
        support.build_layers(self.root)
        self.other = self.folder / "other"
        subprocess.run(["cp", "-a", TREE, self.other], check=True)
        (self.other / "opt").mkdir(exist_ok=True)
        (self.other / "opt" / "own").write_bytes(os.urandom(2 * MIB))
        (self.other / "etc" / "issue").write_text("the other one\n", encoding="ascii")
        self.built = json.loads(self.layer("build", "--kind", "base", "--name", "other:1", "--from-dir", self.other).stdout)

    def layer(self, *words):
        done = subprocess.run([DSEC, "--json", "layer", "--layers", self.root, *words], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    def usage(self):
        return json.loads(self.layer("du").stdout)

    def folder_of(self, ref):
        return self.root / "blobs" / json.loads(self.layer("show", ref).stdout)["id"].split(":")[1]


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces, mounts and cgroups")
    return Store(tmp_path_factory.mktemp("shared")).root


@pytest.fixture(scope="module")
def store(layers):
    made = object.__new__(Store)
    made.folder, made.root = layers.parent, layers
    made.other = made.folder / "other"
    return made


def digests(box, *paths):
    read = box.run_shell("sha256sum " + " ".join(paths), timeout=60)
    assert read.exit_code == 0, read.stderr
    return [line.split()[0].decode() for line in read.stdout.splitlines()]


def wanted(tree, *paths):
    return [hashlib.sha256((tree / path.lstrip("/")).read_bytes()).hexdigest() for path in paths]


# Not what each sandbox has written for itself.
LIST = "cd / && find usr etc opt -xdev -type f ! -name hostname ! -name hosts ! -name resolv.conf -print0 | sort -z | xargs -0 sha256sum | sha256sum"


def test_bases_share_and_run_side_by_side(store, node):
    usage = store.usage()
    assert usage["kept_allocated_bytes"] == 0
    [other] = [item for item in usage["layers"] if item["names"] == ["other:1"]]
    assert other["shared_bytes"] > 20 * MIB and other["blob_allocated_bytes"] < other["shared_bytes"] / 4
    assert (store.folder_of("other:1") / "form.json").exists() and not (store.folder_of("other:1") / "data.blob").exists()
    with node.client() as client, sandbox(client) as first, sandbox(client, container_image="other:1") as second:
        paths = ("/bin/bash", "/usr/bin/python3.11")
        assert digests(first, *paths) == wanted(TREE, *paths)
        assert digests(second, *paths, "/opt/own", "/etc/issue") == wanted(store.other, *paths, "/opt/own", "/etc/issue")
        assert first.run_shell("test -e /opt/own").exit_code == 1
    doctor = node.cli("doctor").stdout.decode()
    assert [line for line in doctor.splitlines() if "layer_sharing" in line and "kept once" in line], doctor
    assert json.loads(store.layer("verify").stdout)["damaged"] == 0


def test_pack_over_a_base_that_shares(store, node):
    with node.client() as client, sandbox(client, container_image="other:1") as box:
        assert box.run_shell("cp /usr/bin/python3.11 /opt/python; rm /etc/issue; cat /opt/own > /opt/copy").ok
        shown = box.run_shell(LIST).stdout
        packed = box.pack_diff("packed:1")
        assert packed["layer"]["names"] == ["packed:1"]
        with sandbox(client, container_image="other:1", workspace="packed:1") as again:
            assert again.run_shell(LIST).stdout == shown
            assert again.run_shell("test -e /etc/issue").exit_code == 1
    # What the workspace copied of its base is kept once: the 2 MiB, which are most of a file; of the 120 MB of the first base it uses too little.
    [item] = [item for item in store.usage()["layers"] if item["names"] == ["packed:1"]]
    assert item["shared_bytes"] == 2 * MIB
    store.layer("rm", "packed:1")


def test_trace_of_a_shared_layer_is_read_ahead(store, node):
    with node.client() as client:
        with sandbox(client, container_image="other:1", record_first_touch=True) as box:
            assert box.run_shell("cat /opt/own /usr/bin/python3.11 > /dev/null").ok
            box.first_touch(save=True)
    (store.folder / "ahead").mkdir()
    other = support.Node(store.folder / "ahead", store.root, "sharedahead").start()
    try:
        with other.client() as client, sandbox(client, container_image="other:1") as box:
            def metric(name):
                lines = [line for line in other.curl("GET", "/metrics", raw=True)[2].decode().splitlines() if line.startswith(name + " ")]
                return float(lines[0].split()[1]) if lines else 0
            support.wait_until(lambda: metric("dsec_layers_traced_total") >= 1 and metric("dsec_layers_prefetch_waiting_bytes") == 0
                               and metric("dsec_layers_prefetch_read_bytes_total") + metric("dsec_layers_prefetch_present_bytes_total")
                               >= 2 * MIB, 30, "it is read ahead")
            assert digests(box, "/opt/own", "/bin/bash") == wanted(store.other, "/opt/own", "/bin/bash")
    finally:
        other.stop()
        assert other.purge().returncode == 0


def image_layout(folder, layers):
    """An OCI layout of tars, lowest first."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data):
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    described = [dict(put(data), mediaType="application/vnd.oci.image.layer.v1.tar") for data in layers]
    config = {"architecture": "amd64" if os.uname().machine == "x86_64" else "arm64", "os": "linux",
              "config": {"Env": ["IMAGE=pairs"]},
              "rootfs": {"type": "layers", "diff_ids": [one["digest"] for one in described]}}
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": described,
                "config": dict(put(json.dumps(config).encode()), mediaType="application/vnd.oci.image.config.v1+json")}
    index = {"schemaVersion": 2, "manifests": [dict(put(json.dumps(manifest).encode()),
                                                    mediaType="application/vnd.oci.image.manifest.v1+json")]}
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}', encoding="ascii")
    (folder / "index.json").write_text(json.dumps(index), encoding="ascii")
    return folder


def make_tar(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_a_large_image_is_several_layers_under_one_name(store, node, tmp_path):
    lowest = subprocess.run(["tar", "-C", TREE, "-c", "."], capture_output=True, check=True).stdout
    big = os.urandom(4 * MIB)
    layout = image_layout(tmp_path / "image", [
        lowest, make_tar([("opt/big", big), ("etc/.wh.issue", b""), ("bin/through-a-link", b"x")]),
        make_tar([("opt/.wh.big", b""), ("opt/small", b"small"), ("usr/share/.wh.doc", b""), ("srv/more", os.urandom(MIB))])])
    whole = json.loads(store.layer("build", "--kind", "base", "--name", "whole:1", "--from-oci", layout).stdout)
    pairs = json.loads(store.layer("build", "--kind", "base", "--name", "pairs:1", "--from-oci", layout, "--collapse", "1m").stdout)
    assert "lower" not in whole and len(pairs["lower"]) == 2
    # The lowest layer of the image is, but for its configuration, the base that is there already.
    status, _, shown = node.curl("GET", "/v1/layers/pairs:1")
    assert status == 200 and shown["lower"] == pairs["lower"]
    with node.client() as client, sandbox(client, container_image="whole:1") as one, sandbox(client, container_image="pairs:1") as several:
        assert one.run_shell(LIST).stdout == several.run_shell(LIST).stdout
        check = "cat /opt/small; ls /opt; test -e /etc/issue || echo gone; test -d /usr/share/doc || echo gone; cat /usr/bin/through-a-link"
        assert several.run_shell(check).stdout == one.run_shell(check).stdout == b"smallsmall\ngone\ngone\nx"
        assert several.run_shell("rm -r /opt/small /usr/share/locale; echo new > /opt/new").exit_code == 0
        packed = several.pack_diff("over-pairs:1")
        record = node.curl("GET", f"/v1/sandboxes/{several.id}")[2]
        assert record["layer_ids"] == pairs["lower"] + [pairs["id"]]
        assert packed["layer"]["labels"]["dsec.pack.parents"] == ",".join(record["layer_ids"])
        refused = subprocess.run([DSEC, "layer", "--layers", store.root, "rm", pairs["lower"][0]], capture_output=True, timeout=60)
        assert refused.returncode != 0 and b"layer.in_use" in refused.stderr
        with sandbox(client, container_image="pairs:1", workspace="over-pairs:1") as again:
            assert again.run_shell("ls /opt; test -e /usr/share/locale || echo gone").stdout == b"new\ngone\n"
    assert json.loads(store.layer("verify", "pairs:1").stdout)["damaged"] == 0
    exported = json.loads(store.layer("export", "pairs:1", "--to", str(tmp_path / "out")).stdout)
    assert [item["id"] for item in exported["layers"]] == pairs["lower"] + [pairs["id"]]
    for item in exported["layers"]:
        made = tmp_path / "out" / "blobs" / item["id"].split(":")[1]
        manifest = json.loads((made / "manifest.json").read_bytes())
        assert hashlib.sha256((made / "data.blob").read_bytes()).hexdigest() == manifest["blob"]["sha256"]
    store.layer("rm", "over-pairs:1", "pairs:1", "whole:1")


def test_a_base_lives_on_when_the_one_that_it_shares_with_goes(store, node):
    with node.client() as client, sandbox(client, container_image="other:1") as box:
        shown = box.run_shell(LIST).stdout
    store.layer("build", "--kind", "base", "--name", "third:1", "--from-dir", str(store.other / "usr"))
    node.kill()
    node.start()
    for ref in (BASE, "third:1"):
        status, _, reply = node.curl("DELETE", f"/v1/layers/{ref}")
        assert status in (200, 204), reply
    assert json.loads(store.layer("verify").stdout)["damaged"] == 0
    assert store.usage()["kept_allocated_bytes"] > 10 * MIB
    with node.client() as client, sandbox(client, container_image="other:1") as box:
        assert box.run_shell(LIST).stdout == shown
