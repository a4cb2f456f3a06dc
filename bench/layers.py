#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of building layers. `layer_build(build)` measures from a tar to a stored layer beside unpacking the tar and
running mkfs.erofs over it, in the same run. Run alone it prints the figure.
"""

import json
import os
import pathlib
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


if __name__ == "__main__":
    print(json.dumps(layer_build(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/dev").resolve())))
