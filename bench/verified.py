#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""What checking each chunk costs: the same reads with layers as they are, checked from the store, checked over HTTP from
loopback, and from the local copy. One JSON line a figure. As root, after `make build`:

    bench/verified.py [--build build/dev] [--megabytes 256]
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python")]
RUNS = 3
# Interpreter, compiler and some thousand small files of the base.
TASK = "python3 -c 'import asyncio, json, unittest, xml.dom, http.server' && cp -r /usr/lib/python3.11 /tmp/p && python3 -m compileall -qf /tmp/p"


def drop_pages():
    """Nothing that the tests read is in the page cache of the host."""
    os.sync()
    pathlib.Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


def fetched(node):
    """Bytes that came from the source, as counted by now."""
    time.sleep(1.5)  # the counts come once a second
    text = node.curl("GET", "/metrics", raw=True)[2].decode()
    found = [line for line in text.splitlines() if line.startswith("dsec_layers_fetched_bytes_total ")]
    return float(found[0].split()[1]) if found else 0.0


def timed(box, script):
    """Seconds of one script in the sandbox."""
    started = time.perf_counter()
    result = box.run_shell(script, timeout=600)
    if result.exit_code != 0:
        raise RuntimeError(result.stderr)
    return time.perf_counter() - started


def measure(support, store, label, warm, **config):
    """Medians of a node with these settings: cold ones on a new node each, warm ones on one that has read everything."""
    read, task, brought = [], [], []
    for _ in range(RUNS):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-"))
        node = support.Node(folder, store, f"bv{os.getpid()}", **config).start()
        try:
            with node.client() as client, support.sandbox(client, workspace="big:1", memory_limit_mb=2048) as box:
                if warm:
                    timed(box, "cat /cold/data > /dev/null")
                    timed(box, TASK + "; rm -rf /tmp/p")
                drop_pages()
                before = fetched(node)
                read.append(timed(box, "dd if=/cold/data of=/dev/null bs=1M status=none"))
                drop_pages()
                task.append(timed(box, TASK))
                brought.append(fetched(node) - before)
        finally:
            node.stop()
            node.purge()
            shutil.rmtree(folder, ignore_errors=True)
    return {"way": label, "read_s": statistics.median(read), "task_s": statistics.median(task), "fetched_mib": statistics.median(brought) / 2**20}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "dev")
    parser.add_argument("--megabytes", type=int, default=256)
    arguments = parser.parse_args()
    os.environ["DSEC_BUILD"] = str(arguments.build.resolve())
    import http_blobs
    import support

    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-bench-"))
    try:
        store = support.build_layers(folder / "layers")
        (folder / "tree" / "cold").mkdir(parents=True)
        with open(folder / "tree" / "cold" / "data", "wb") as file:
            for _ in range(arguments.megabytes):
                file.write(os.urandom(2**20))
        subprocess.run([support.DSEC, "layer", "build", "--layers", store, "--kind", "workspace", "--name", "big:1", "--from-dir", folder / "tree"],
                       check=True, stdout=subprocess.DEVNULL)
        server = http_blobs.BlobServer(store)
        try:
            for label, warm, config in (
                ("plain", False, {}),
                ("checked, from the store", False, {"layers_verify": True}),
                ("checked, over HTTP from loopback", False, {"layers_url": server.url}),
                ("checked, from the local copy", True, {"layers_verify": True}),
            ):
                print(json.dumps(dict(measure(support, store, label, warm, **config), name="verified_read", megabytes=arguments.megabytes)), flush=True)
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
