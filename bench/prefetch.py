#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`prefetch_first_command`: the first command of a sandbox over a base that nothing has read yet, on MooseFS, with and without a
trace of first reads (bench/README.md). Small and alone, as root:

    bench/prefetch.py --build build/dev --runs 5

The trace is made as users make it: a sandbox with record_first_touch runs the command once. Before each run the MooseFS client is
replaced, the page caches are dropped and a new node is started. The two ways take turns.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python"), str(ROOT / "tools" / "shared_root")]

BASE = "prefetch:1"
# A tool that loads some hundred files of the base, as test runners do.
COMMAND = ["python3", "-c", "import asyncio, email.message, http.client, json, sqlite3, ssl, unittest, xml.dom.minidom; print(1)"]
THINKING = 2.0  # seconds between the create and the command: less than a model takes for its first answer
READ = "dsec_layers_prefetch_read_bytes_total"


class Bench:
    """A MooseFS with the base on it."""

    def __init__(self, build, folder):
        os.environ["DSEC_BUILD"] = str(build)
        import moosefs

        self.folder = pathlib.Path(folder)
        self.dsec = build / "bin" / "dsec"
        self.cluster = moosefs.MooseFs(self.folder / "moosefs", nice=os.nice(0))
        self.layers = self.cluster.mnt / "layers"

    def prepare(self):
        self.cluster.start()
        tree = ROOT / "build" / "demo" / "base"
        subprocess.run([ROOT / "tools" / "demo" / "build_base.sh", tree], check=True, stdout=subprocess.DEVNULL)
        built = subprocess.check_output([self.dsec, "--json", "layer", "build", "--layers", self.layers, "--kind", "base",
                                         "--name", BASE, "--from-dir", tree])
        return json.loads(built)["blob_bytes"]

    def forget(self):
        """No page of any file is in memory, neither in the kernel nor in the MooseFS client."""
        self.cluster.remount()
        os.sync()
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")

    def fetched(self):
        """Bytes that the MooseFS client has handed to the kernel (proc(5), io, wchar)."""
        text = pathlib.Path(f"/proc/{self.cluster.client.pid}/io").read_text(encoding="ascii")
        return int(re.search(r"^wchar: (\d+)$", text, re.MULTILINE).group(1))

    @contextlib.contextmanager
    def node(self, **config):
        import support

        folder = tempfile.mkdtemp(prefix="dsec-pf-")
        node = support.Node(folder, self.layers, f"prefetch{os.getpid()}", **config).start(60)
        try:
            with node.client() as client:
                yield node, client
        finally:
            if node.process.poll() is None:
                node.stop()
            purged = node.purge()
            left = support.host_things(node.node_id)
            support.remove_tree(folder)
            if purged.returncode != 0 or left:
                raise RuntimeError(f"left on the host: {left}; purge said {purged.stderr!r}")

    def record(self):
        from libdsec import DSecContainerRunArgs

        with self.node() as (_, client):
            box = client.run_container(DSecContainerRunArgs(container_image=BASE, record_first_touch=True), timeout=120)
            check(box.exec(COMMAND, timeout=120))
            touched = box.first_touch(save=True)
            box.stop()
        return touched["layers"][0]

    def first_command(self, prefetch, thinking):
        """{create, command, fetched, read_ahead}: seconds and bytes of one cold first command."""
        from libdsec import DSecContainerRunArgs

        self.forget()
        with self.node(layers_prefetch=prefetch) as (node, client):
            sent = self.fetched()
            started = time.perf_counter()
            box = client.run_container(DSecContainerRunArgs(container_image=BASE), timeout=120)
            created = time.perf_counter()
            time.sleep(thinking)  # the time that passes is what is measured
            began = time.perf_counter()
            check(box.exec(COMMAND, timeout=120))
            ended = time.perf_counter()
            fetched = self.fetched() - sent
            text = node.curl("GET", "/metrics", raw=True)[2].decode()
            box.stop()
        read = re.search(rf"^{READ} (\S+)$", text, re.MULTILINE)
        return {"create": created - started, "command": ended - began, "fetched": fetched,
                "read_ahead": float(read.group(1)) if read else 0.0}


def check(result):
    if not result.ok:
        raise RuntimeError(f"{result!r} {result.stderr!r}")


def medians(runs):
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def rounded(measured):
    return {"create_ms": round(measured["create"] * 1000, 1), "command_ms": round(measured["command"] * 1000, 1),
            "fetched_mib": round(measured["fetched"] / 2**20, 2), "read_ahead_mib": round(measured["read_ahead"] / 2**20, 2)}


def measure(build, runs, requests):
    """The figure, as a record of figures.jsonl."""
    folder = tempfile.mkdtemp(prefix="dsec-prefetch-")
    bench = Bench(build, folder)
    try:
        size = bench.prepare()
        trace = bench.record()
        ways = {(on, thinking): [] for thinking in (0.0, THINKING) for on in (0, requests)}
        for _ in range(runs):
            for (on, thinking), measured in ways.items():
                measured.append(bench.first_command(on, thinking))
    finally:
        import support

        bench.cluster.stop()
        support.remove_tree(folder)
    at = {key: medians(values) for key, values in ways.items()}
    with_trace, without = at[requests, THINKING]["command"], at[0, THINKING]["command"]
    return {
        "name": "prefetch_first_command", "value": round(with_trace * 1000, 1), "unit": "ms", "baseline": round(without * 1000, 1),
        "ratio": round(without / with_trace, 3),
        "detail": {
            "thinking_s": THINKING, "runs": runs, "requests": requests, "blob_mib": round(size / 2**20, 1),
            "trace_mib": round(trace["saved_bytes"] / 2**20, 2), "trace_parts": trace["saved_parts"],
            "prefetch": rounded(at[requests, THINKING]), "on_demand": rounded(at[0, THINKING]),
            "prefetch_at_once": rounded(at[requests, 0.0]), "on_demand_at_once": rounded(at[0, 0.0]),
        },
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=2, help="layers_prefetch of the node")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "prefetch.jsonl")
    arguments = parser.parse_args()
    line = json.dumps(measure(arguments.build.resolve(), arguments.runs, arguments.requests))
    print(line)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(line + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
