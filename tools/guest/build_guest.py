#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel and the initramfs of microVMs: Debian's cloud kernel and the project's static binaries.

    build_guest.py --bin build/dev/bin --out build/guest

The package is fetched as `apt-get download` does, from whatever source of this machine has a linux-image-6.12* for
the cloud (bookworm-backports, bookworm-security or trixie), and kept in --out by version. The same package and
binaries give the same bytes.
"""
import argparse
import hashlib
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Loaded by dsec-guest in this order; what a module needs comes before it. A name may be missing where the kernel has
# it built in (modules.builtin says so).
MODULES = ["virtio_mmio", "virtio_blk", "libcrc32c", "erofs", "overlay", "virtio_balloon"]
REQUIRED = ["virtio_mmio", "virtio_blk", "erofs", "overlay", "virtio_balloon"]
BINARIES = {"init": "dsec-guest", "bin/dsec-spawner": "dsec-spawner", "bin/dsec-aether": "dsec-aether"}
PACKAGE = re.compile(r"^linux-image-6\.12\.[0-9][^ ]*-cloud-amd64-unsigned$")


def fail(message):
    sys.exit(f"build_guest: {message}")


def run(*argv, cwd=None):
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(argv)} failed: {done.stderr.strip()[-400:]}")
    return done.stdout


def version_key(name):
    return [int(part) for part in re.findall(r"\d+", name)]


def find_package():
    """Name and version of the newest package that this machine's sources have."""
    names = [line.split(" - ")[0].strip() for line in run("apt-cache", "search", "--names-only", "^linux-image-6.12").splitlines()]
    names = sorted((name for name in names if PACKAGE.match(name)), key=version_key)
    if not names:
        fail("no source of this machine has linux-image-6.12*-cloud-amd64-unsigned. On Debian 12 add bookworm-backports or "
             "bookworm-security to the sources of apt and run `apt-get update`.")
    policy = run("apt-cache", "policy", names[-1])
    candidate = re.search(r"Candidate: (\S+)", policy)
    if not candidate or candidate.group(1) == "(none)":
        fail(f"{names[-1]} has no candidate; run `apt-get update`")
    return names[-1], candidate.group(1)


def fetch(name, version, cache):
    """The unpacked package, kept by name and version."""
    folder = cache / f"{name}_{version.replace(':', '%3a')}"
    if (folder / "complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        # The sandbox user of apt cannot write to a folder of ours.
        run("apt-get", "download", "-o", "APT::Sandbox::User=root", f"{name}={version}", cwd=work)
        packages = list(pathlib.Path(work).glob("*.deb"))
        if len(packages) != 1:
            fail(f"apt-get download left {len(packages)} packages")
        run("dpkg-deb", "-x", str(packages[0]), f"{work}/root")
        os.rename(f"{work}/root", folder)
    (folder / "complete").touch()
    return folder


class Archive:
    """The newc format: Documentation/driver-api/early-userspace/buffer-format.rst of Linux."""

    def __init__(self):
        self.data = bytearray()
        self.inode = 1

    def add(self, name, mode, content=b"", rdev=(0, 0)):
        path = name.encode() + b"\0"
        fields = [self.inode, mode, 0, 0, 1, 0, len(content), 0, 0, rdev[0], rdev[1], len(path), 0]
        self.inode += 1
        self.data += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        self.data += b"\0" * (-len(self.data) % 4)
        self.data += content
        self.data += b"\0" * (-len(self.data) % 4)

    def finish(self):
        self.inode = 0
        self.add("TRAILER!!!", 0)
        self.data += b"\0" * (-len(self.data) % 512)
        return bytes(self.data)


def modules_of(package):
    roots = [path for base in ("lib/modules", "usr/lib/modules") for path in (package / base).glob("*") if path.is_dir()]
    if len(roots) != 1:
        fail(f"{package} holds {len(roots)} folders of modules")
    built_in = {pathlib.PurePath(line).name.removesuffix(".ko").replace("-", "_")
                for line in (roots[0] / "modules.builtin").read_text().splitlines()}
    files = {path.name.split(".ko")[0]: path for path in sorted(roots[0].rglob("*.ko*"))}
    found = []
    for name in MODULES:
        if name in files:
            path = files[name]
            content = path.read_bytes()
            found.append((f"{name}.ko", lzma.decompress(content) if path.name.endswith(".xz") else content))
        elif name in REQUIRED and name.replace("-", "_") not in built_in:
            fail(f"the kernel package has no module {name}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=pathlib.Path, help="folder of dsec-guest, dsec-spawner, dsec-aether")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="receives vmlinuz and initrd")
    parser.add_argument("--package", type=pathlib.Path, help="an unpacked kernel package in place of Debian's newest")
    parser.add_argument("--cache", type=pathlib.Path, help="where unpacked kernel packages are kept; --out")
    parser.add_argument("--init", default=BINARIES["init"], help="program of --bin that becomes the first process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cache = args.cache or args.out
    cache.mkdir(parents=True, exist_ok=True)
    cached = sorted((path.parent for path in cache.glob("linux-image-*/complete")), key=lambda path: version_key(path.name))
    if args.package:
        package = args.package
    elif cached:
        package = cached[-1]
    else:
        name, version = find_package()
        package = fetch(name, version, cache)

    archive = Archive()
    for folder in ("bin", "dev", "modules", "proc", "root", "run", "sys", "tmp"):
        archive.add(folder, 0o040755)
    # What the first process has as 0, 1 and 2 (init/main.c, console_on_rootfs).
    archive.add("dev/console", 0o020600, rdev=(5, 1))
    for target, source in sorted({**BINARIES, "init": args.init}.items()):
        path = args.bin / source
        if not path.exists():
            fail(f"{path} is not built")
        with tempfile.NamedTemporaryFile() as stripped:
            run("strip", "-o", stripped.name, str(path))
            archive.add(target, 0o100755, pathlib.Path(stripped.name).read_bytes())
    modules = modules_of(package)
    for name, content in modules:
        archive.add(f"modules/{name}", 0o100644, content)
    archive.add("modules/order", 0o100644, "".join(f"{name}\n" for name, _ in modules).encode())
    kernels = sorted((package / "boot").glob("vmlinuz-*"))
    if len(kernels) != 1:
        fail(f"{package} holds {len(kernels)} kernels")
    initrd = archive.finish()
    for name, content in (("vmlinuz", kernels[0].read_bytes()), ("initrd", initrd)):
        target = args.out / name
        if target.exists() and target.read_bytes() == content:
            continue
        fresh = args.out / f"{name}.new"
        fresh.write_bytes(content)
        os.chmod(fresh, 0o644)
        os.rename(fresh, target)
    print(f"{args.out}: {kernels[0].name}, {len(modules)} modules, initrd of {len(initrd)} bytes, "
          f"sha256 {hashlib.sha256(initrd).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
