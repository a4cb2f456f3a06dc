#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""The figure `pack_diff`: a pack of a sandbox with 200 MB in 10,000 files, beside GNU tar of the same upper folder.

Both begin with dropped page caches. tar writes into a pipe that is read and thrown away: with /dev/null as its archive it
reads no content. `bench/run.py` calls bench_pack_diff; alone: bench/pack_diff.py --build build/release.
"""

import argparse
import asyncio
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python"), str(ROOT / "bench")]

FILES = 10_000
FILE_BYTES = 20_000
FILL = f"""
mkdir -p /work && cd /work && dd if=/dev/urandom of=/work/random bs={FILE_BYTES} count={FILES} 2>/dev/null
i=0
while [ $i -lt {FILES} ]; do
  d=$((i / 100)); [ -d $d ] || mkdir $d
  dd if=/work/random of=$d/$i bs={FILE_BYTES} count=1 skip=$i 2>/dev/null
  i=$((i + 1))
done
rm /work/random
"""


def drop_caches():
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")


def upper_of(pid, sandbox_id):
    """The upper folder of a sandbox, through the daemon's descriptor of the writable layers."""
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        upper = link / sandbox_id / "upper"
        if upper.is_dir():
            return upper
    raise AssertionError("no descriptor of the writable layers")


def tar_ms(folder):
    started = time.perf_counter()
    with subprocess.Popen(["tar", "-C", folder, "-cf", "-", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["cat"], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True)
    assert tar.returncode == 0, tar.returncode
    return (time.perf_counter() - started) * 1e3


async def bench_pack_diff(figures, node, client, runs=5):
    from support import args as make_args

    box = await client.run_container(make_args(memory_limit_mb=1024, disk_limit_mb=1024, labels={"bench": "pack"}))
    filled = await box.run_shell(FILL, timeout=300)
    assert filled.ok, filled
    upper = upper_of(node.process.pid, box.id)
    tars, packs, frozen = [], [], []
    for _ in range(runs):
        drop_caches()
        tars.append(tar_ms(upper))
        drop_caches()
        started = time.perf_counter()
        packed = await box.pack_diff()
        packs.append((time.perf_counter() - started) * 1e3)
        frozen.append(packed["frozen_us"] / 1e3)
        removed = node.cli("layer", "rm", "--layers", node.layers, packed["layer"]["id"])
        assert removed.returncode == 0, removed.stderr
    layer = packed["layer"]
    await box.stop()
    assert layer["content_bytes"] >= FILES * FILE_BYTES and layer["entries"] >= FILES, layer
    figures.add("pack_diff", statistics.median(packs), "ms", statistics.median(tars), frozen_ms=statistics.median(frozen),
                entries=layer["entries"], content_mb=layer["content_bytes"] / 1e6, all_ms=packs, all_tar_ms=tars)


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "pack_diff.jsonl")
    arguments = parser.parse_args()
    os.environ["DSEC_BUILD"] = str(arguments.build.resolve())
    import run
    import support
    from libdsec import DSecClient

    layers = support.build_layers(support.BUILD / "test-layers")
    with tempfile.TemporaryDirectory(prefix="dsec-bench-") as folder:
        node = support.Node(folder, layers, f"bench{os.getpid()}").start()
        try:
            async with DSecClient(node.url, node.key) as client:
                await bench_pack_diff(run.Figures(arguments.out), node, client)
        finally:
            node.stop()
            node.purge()


if __name__ == "__main__":
    asyncio.run(main())
