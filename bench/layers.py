#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of layers. `layer_build(build)` measures from a tar to a stored layer beside unpacking the tar and running
mkfs.erofs over it, in the same run; `layer_compress(build)` what the compressed form costs and saves beside the plain one
and beside mkfs.erofs -zlz4hc. Run alone with the name of one it prints that figure.
"""

import contextlib
import ctypes
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

TREES = os.environ.get("DSEC_BENCH_TREES", "/usr/include:/usr/lib/python3:/usr/share").split(":")
RUNS = 3


def _run(command, cwd):
    """Runs a command; returns (seconds, peak MiB of it or of its largest child, standard output)."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        pid = os.posix_spawnp(
            "/usr/bin/env", ["/usr/bin/env", "-C", str(cwd), *map(str, command)], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, output.fileno(), 1)]
        )
        _, status, usage = os.wait4(pid, 0)
        seconds = time.perf_counter() - started
        output.seek(0)
        text = output.read().decode()
    if status != 0:
        raise RuntimeError(f"{command} ended with status {status}: {text}")
    return seconds, usage.ru_maxrss / 1024, text


def _settle():
    """What earlier steps wrote is on the disk, so that a run pays for its own writes."""
    os.sync()


def _build(build, tar, folder):
    """One build into a new store: (seconds, peak MiB, what dsec says of it)."""
    _settle()
    store = folder / "store"
    seconds, peak, text = _run(
        [build / "bin" / "dsec", "--json", "layer", "--layers", store, "build", "--kind", "base", "--from-tar", tar], folder
    )
    shutil.rmtree(store)
    return seconds, peak, json.loads(text)


def _unpack_and_mkfs(tar, folder, durable):
    """The same with GNU tar and mkfs.erofs; `durable`: with the digests and the sync that a layer needs."""
    _settle()
    steps = [
        ["tar", "-C", "tree", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-xpf", tar],
        ["mkfs.erofs", "--quiet", "--preserve-mtime", "--blobdev=blob", "--chunksize=65536", "-Enoinline_data", "meta", "tree"],
    ]
    if durable:
        steps += [["sha256sum", "meta", "blob"], ["sync", "meta", "blob"]]
    (folder / "tree").mkdir()
    total = [_run(step, folder) for step in steps]
    shutil.rmtree(folder / "tree")
    for name in ("meta", "blob"):
        (folder / name).unlink()
    return sum(step[0] for step in total), max(step[1] for step in total)


def layer_build(build):
    """MB/s from a tar to a stored layer, digests and sync included. The tar lies in the page cache, members sorted as
    image layers have them; the same tar in the order of the folders is in the detail, where the content is copied once.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-layers-"))
    try:
        tar = folder / "sorted.tar"
        other = folder / "unsorted.tar"
        make = ["tar", "--numeric-owner", "--xattrs", "--format=posix"]
        _run([*make, "--sort=name", "-cf", tar, *TREES], folder)
        _run([*make, "--sort=none", "-cf", other, *reversed(TREES)], folder)
        megabytes = tar.stat().st_size / 1e6
        ours, baseline, plain, unsorted = [], [], [], []
        for _ in range(RUNS):
            ours.append(_build(build, tar, folder))
            baseline.append(_unpack_and_mkfs(tar, folder, True))
            plain.append(_unpack_and_mkfs(tar, folder, False))
            unsorted.append(_build(build, other, folder))

        def rate(runs):
            return megabytes / statistics.median(run[0] for run in runs)

        layer = ours[0][2]
        return {
            "name": "layer_build",
            "value": round(rate(ours), 1),
            "unit": "MB/s",
            "baseline": round(rate(baseline), 1),
            "ratio": round(rate(ours) / rate(baseline), 3),
            "detail": {
                "tar_mb": round(megabytes),
                "entries": layer["entries"],
                "peak_mib": round(max(run[1] for run in ours), 1),
                "peak_mib_baseline": round(max(run[1] for run in baseline), 1),
                "unsorted_mb_s": round(rate(unsorted), 1),
                "unsorted_peak_mib": round(max(run[1] for run in unsorted), 1),
                "baseline_without_digest_and_sync_mb_s": round(rate(plain), 1),
                "read_ms": layer["read_ms"],
                "write_ms": layer["write_ms"],
                "publish_ms": layer["publish_ms"],
                "same_id": layer["id"] == unsorted[0][2]["id"],
            },
        }
    finally:
        shutil.rmtree(folder)


# --- compressed layers ---

READS = 4000
_LIBC = ctypes.CDLL(None, use_errno=True)
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # of all architectures


def _syscall(number, *arguments):
    value = _LIBC.syscall(number, *arguments)
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


@contextlib.contextmanager
def _mounted(layer):
    """A detached mount of a layer's files, as the node has it: a descriptor of its root. Nothing of it is in memory."""
    _drop_caches(layer)
    context = _syscall(_FSOPEN, b"erofs", 1)
    for key, path in ((b"source", layer / "meta.erofs"), (b"device", layer / "data.blob")):
        _syscall(_FSCONFIG, context, 1, key, str(path).encode(), 0)  # FSCONFIG_SET_STRING
    _syscall(_FSCONFIG, context, 6, None, None, 0)  # FSCONFIG_CMD_CREATE
    mount = _syscall(_FSMOUNT, context, 1, 0x1)  # MOUNT_ATTR_RDONLY
    os.close(context)
    root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield root
    finally:
        os.close(root)
        os.close(mount)


def _drop_caches(layer):
    """Nothing of the layer's files is in memory; of the mount nothing can be, as it is new."""
    for name in ("meta.erofs", "data.blob"):
        fd = os.open(layer / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _device_read(layer):
    """Bytes that the disk below has read so far; None where there is no such counter."""
    device = os.stat(layer).st_dev
    try:
        stat = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text(encoding="ascii").split()
        return int(stat[2]) * 512
    except OSError:
        return None


def _files(root):
    """All files of a mount with content: (path from the root, size)."""
    found = []
    for folder, _, names, fd in os.fwalk(".", dir_fd=root):
        for name in names:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if status.st_size > 0 and (status.st_mode & 0o170000) == 0o100000:
                found.append((os.path.join(folder, name), status.st_size))
    return sorted(found)


def _read_all(layer):
    """(MB/s, MB read from the disk) of reading every file once, cold."""
    with _mounted(layer) as root:
        files = _files(root)
        before, started, total = _device_read(layer), time.perf_counter(), 0
        for path, _ in files:
            fd = os.open(path, os.O_RDONLY, dir_fd=root)
            while piece := os.read(fd, 1 << 20):
                total += len(piece)
            os.close(fd)
        seconds = time.perf_counter() - started
        after = _device_read(layer)
    return total / 1e6 / seconds, (after - before) / 1e6 if before is not None else None


def _read_random(layer):
    """(reads a second, median us, MB read from the disk) of 4 KiB reads at random places of all content, cold, one at a time
    and without read-ahead of the file."""
    with _mounted(layer) as root, contextlib.ExitStack() as stack:
        files = _files(root)
        chooser = random.Random(1)
        chosen = chooser.choices(files, weights=[size for _, size in files], k=READS)
        open_files = {}
        for path in {path for path, _ in chosen}:
            open_files[path] = os.open(path, os.O_RDONLY, dir_fd=root)
            stack.callback(os.close, open_files[path])
            os.posix_fadvise(open_files[path], 0, 0, os.POSIX_FADV_RANDOM)
        before, times = _device_read(layer), []
        for path, size in chosen:
            at = chooser.randrange(0, (size + 4095) // 4096) * 4096
            started = time.perf_counter()
            os.pread(open_files[path], 4096, at)
            times.append(time.perf_counter() - started)
        after = _device_read(layer)
    return READS / sum(times), statistics.median(times) * 1e6, (after - before) / 1e6 if before is not None else None


def layer_compress(build):
    """Stored bytes of the compressed form over the plain one; what building and reading each costs is in the detail, with
    mkfs.erofs -zlz4hc of the same tree (64 KiB clusters, without tails in the metadata, as ours has none)."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-layers-"))
    try:
        tar = folder / "a.tar"
        _run(["tar", "--numeric-owner", "--xattrs", "--format=posix", "--sort=name", "-cf", tar, *TREES], folder)
        megabytes = tar.stat().st_size / 1e6
        forms, detail = {}, {"tar_mb": round(megabytes)}
        for form, words in (("plain", []), ("lz4hc3", ["--compress", "lz4hc:3"]), ("lz4hc9", ["--compress", "lz4hc:9"])):
            _settle()
            store = folder / form
            seconds, peak, text = _run(
                [build / "bin" / "dsec", "--json", "layer", "--layers", store, "build", "--kind", "base", "--from-tar", tar, *words], folder
            )
            layer = json.loads(text)
            forms[form] = store / "blobs" / layer["id"].split(":")[1]
            detail[form] = {"build_mb_s": round(megabytes / seconds, 1), "peak_mib": round(peak, 1),
                            "meta_mb": round(layer["meta_bytes"] / 1e6, 2), "blob_mb": round(layer["blob_bytes"] / 1e6, 1)}
        _settle()
        for form in ("plain", "lz4hc9"):
            whole = [_read_all(forms[form]) for _ in range(RUNS)]
            single = [_read_random(forms[form]) for _ in range(RUNS)]
            detail[form].update(
                sequential_mb_s=round(statistics.median(run[0] for run in whole), 1),
                sequential_disk_mb=round(whole[0][1], 1) if whole[0][1] is not None else None,
                random_4k_a_second=round(statistics.median(run[0] for run in single)),
                random_4k_p50_us=round(statistics.median(run[1] for run in single), 1),
                random_4k_disk_mb=round(single[0][2], 1) if single[0][2] is not None else None,
            )
        (folder / "tree").mkdir()
        _run(["tar", "-C", "tree", "--numeric-owner", "-xpf", tar], folder)
        seconds, peak, _ = _run(["mkfs.erofs", "--quiet", "-zlz4hc,9", "-C65536", "-Enoinline_data", "mkfs.erofs", "tree"], folder)
        detail["mkfs_lz4hc9"] = {"build_mb_s": round(megabytes / seconds, 1), "peak_mib": round(peak, 1),
                                 "image_mb": round((folder / "mkfs.erofs").stat().st_size / 1e6, 1)}

        def stored(form):
            return detail[form]["meta_mb"] + detail[form]["blob_mb"]

        return {"name": "layer_compress", "value": round(stored("lz4hc9"), 1), "unit": "MB", "baseline": round(stored("plain"), 1),
                "ratio": round(stored("lz4hc9") / stored("plain"), 3), "detail": detail}
    finally:
        shutil.rmtree(folder)


FIGURES = {"layer_build": layer_build, "layer_compress": layer_compress}

if __name__ == "__main__":
    wanted = [word for word in sys.argv[1:] if word in FIGURES] or ["layer_build"]
    place = [word for word in sys.argv[1:] if word not in FIGURES] or ["build/dev"]
    for figure in wanted:
        print(json.dumps(FIGURES[figure](pathlib.Path(place[0]).resolve())), flush=True)
