# SPDX-License-Identifier: Apache-2.0
"""Puts the images of bench/workloads.py on the shared root, once: as layers of DSec and as OCI images of the same files.

    ROOT/layers            the layer store: bases, extras, workspaces, tools, and the archives of `workspace_time`
    ROOT/oci               one OCI image layout with all images; its layers are tar.gz, one blob however many share it
    ROOT/oci/made/NAME     digests of a layer's blob, so that a second start makes nothing again
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import tempfile
import zlib

import workloads

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHUNK = 1 << 20
GZIP = 31  # zlib's wbits for a gzip header; its time is 0


def write_tar_gz(tree, target):
    """Writes TREE as tar.gz; returns its digests as an OCI descriptor needs them: {digest, size, diff_id}."""
    tar = subprocess.Popen(["tar", "--sort=name", "--numeric-owner", "--xattrs", "--xattrs-include=*", "--format=posix",
                            "--pax-option=delete=atime,delete=ctime", "-C", tree, "-cf", "-", "."], stdout=subprocess.PIPE)
    plain, packed, size = hashlib.sha256(), hashlib.sha256(), 0
    compressor = zlib.compressobj(6, zlib.DEFLATED, GZIP)
    with open(target, "wb") as output:
        while True:
            data = tar.stdout.read(CHUNK)
            plain.update(data)
            out = compressor.compress(data) if data else compressor.flush()
            packed.update(out)
            size += len(out)
            output.write(out)
            if not data:
                break
    if tar.wait() != 0:
        raise RuntimeError(f"tar of {tree} ended with {tar.returncode}")
    return {"digest": f"sha256:{packed.hexdigest()}", "size": size, "diff_id": f"sha256:{plain.hexdigest()}"}


class ImageSet:
    """`root` is a folder of the shared root, `work` one on local disk for trees and downloads."""

    def __init__(self, build, root, work):
        self.dsec = build / "bin" / "dsec"
        self.work = pathlib.Path(work)
        self.layers = root / "layers"
        self.oci = root / "oci"
        self.archive = workloads.Archive(self.work / "downloads")
        self._present = None

    def prepare(self, images):
        """Makes what is missing of the images, of the tools and of the archives."""
        bases = self.work / "bases"
        (self.oci / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (self.oci / "made").mkdir(exist_ok=True)
        self._present = {name for layer in self.list_layers() for name in layer["names"]}
        if any(not self._made(image.base) for image in images):
            subprocess.run([ROOT / "tools" / "bench" / "build_bases.sh", bases], check=True)
        for image in images:
            self._add("base", image.base, bases / image.language)
            project = image.project
            self._add("workspace", project.layer, lambda tree, p=project: workloads.extract_project(self.archive, p, tree))
            self._add("toolkit", image.extra, lambda tree, i=image: workloads.extract_packages(self.archive, i.packages, tree))
            self._add_archive(project)
            self._write_manifest(image)
        self._add("toolkit", "bench-tools:1", lambda tree: workloads.extract_packages(self.archive, workloads.TOOLS, tree))
        self._write_index(images)

    def list_layers(self):
        """Records of all layers of the store."""
        if not self.layers.exists():
            return []
        output = subprocess.check_output([self.dsec, "--json", "layer", "ls", "--layers", self.layers])
        return json.loads(output)["layers"]

    def sizes(self):
        """{name: bytes of content} of all layers."""
        return {name: layer["content_bytes"] for layer in self.list_layers() for name in layer["names"]}

    def made(self, layer):
        """Digests of the blob of a layer."""
        return json.loads((self.oci / "made" / layer).read_text(encoding="ascii"))

    def _made(self, name):
        return name in self._present and (self.oci / "made" / name).exists()

    def _store(self, kind, name, tree):
        if name not in self._present:
            print(f"layer {name}", flush=True)
            subprocess.run([self.dsec, "layer", "build", "--layers", self.layers, "--kind", kind, "--name", name, "--from-dir", tree],
                           check=True, stdout=subprocess.DEVNULL)
            self._present.add(name)

    def _add(self, kind, name, source):
        """A layer of the store and its OCI blob; `source` is a folder, or fills one that it is given."""
        record = self.oci / "made" / name
        if self._made(name):
            return
        if callable(source):
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                tree = pathlib.Path(folder, "tree")
                tree.mkdir()
                source(tree)
                self._add(kind, name, tree)
            return
        self._store(kind, name, source)
        partial = self.oci / "partial"
        digests = write_tar_gz(source, partial)
        partial.rename(self.oci / "blobs" / "sha256" / digests["digest"].split(":")[1])
        record.write_text(json.dumps(digests), encoding="ascii")

    def _add_archive(self, project):
        """A layer that holds the tar.gz of a workspace and of the tools: what `workspace_time` unpacks for comparison."""
        name = archive_layer(project)
        if name in self._present:
            return
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            tree, archives = pathlib.Path(folder, "tree"), pathlib.Path(folder, "out", "archives")
            archives.mkdir(parents=True)
            tree.mkdir()
            workloads.extract_project(self.archive, project, tree)
            write_tar_gz(tree, archives / "workspace.tar.gz")
            shutil.rmtree(tree)
            tree.mkdir()
            workloads.extract_packages(self.archive, workloads.TOOLS, tree)
            write_tar_gz(tree, archives / "tools.tar.gz")
            archives.parent.chmod(0o755)
            self._store("toolkit", name, archives.parent)

    def _blob(self, data):
        digest = hashlib.sha256(data).hexdigest()
        (self.oci / "blobs" / "sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def _write_manifest(self, image):
        layers = [self.made(name) for name in image.layers]
        config = {"architecture": "amd64", "os": "linux", "config": {},
                  "rootfs": {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]}}
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": {"mediaType": f"{kind}.config.v1+json", **self._blob(json.dumps(config).encode())},
            "layers": [{"mediaType": f"{kind}.layer.v1.tar+gzip", "digest": layer["digest"], "size": layer["size"]} for layer in layers],
        }
        record = {"mediaType": manifest["mediaType"], **self._blob(json.dumps(manifest).encode()),
                  "annotations": {"org.opencontainers.image.ref.name": image.ref}}
        (self.oci / "made" / image.ref).write_text(json.dumps(record), encoding="ascii")

    def _write_index(self, images):
        manifests = [json.loads((self.oci / "made" / image.ref).read_text(encoding="ascii")) for image in images]
        (self.oci / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}), encoding="ascii")
        (self.oci / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="ascii")


def archive_layer(project):
    """Name of the layer with the archives that stand for a project's workspace and the tools."""
    return f"bench-archive-{project.name}:1"
