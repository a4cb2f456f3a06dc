#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Bursts of real tasks over many images, with the layers on MooseFS: `burst_time`, `burst_writes`, `workspace_time` and
`workspace_writes` (bench/README.md says what each is). `bench/run.py` calls bench_bursts; alone, as root:

    bench/burst.py --build build/release --images 8 --tasks 16       the short version
    bench/burst.py --build build/release                             64 images, 256 tasks

What images and tasks are: bench/workloads.py. All lies below build/bench and is made once: root trees, downloads, and the
MooseFS with the layers (some 16 GB for all 64 images). Each measurement begins with a node, a MooseFS client and page
caches that have seen nothing.

Bytes written are those of a loop device: it holds a file system of its own with everything that the node has on local disk
(state, writable layers, copies of metadata, what is pulled), so nobody else's writes are in it, nor those of MooseFS.
"""

import argparse
import asyncio
import collections
import contextlib
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python"), str(ROOT / "bench"), str(ROOT / "tools" / "shared_root")]

import image_set  # noqa: E402
import workloads  # noqa: E402
from moosefs import MooseFs  # noqa: E402

FIGURES = ("burst_time", "burst_writes", "workspace_time", "workspace_writes")
DISK_BYTES = 24 << 30  # sparse; what is removed goes back to the host
SCRATCH_BYTES = 12 << 30
COMMANDS_AT_ONCE = 8  # tasks that compile at the same time: a node of 2 cores and 24 GiB has no memory for 256
PULLS_AT_ONCE = 3  # as containerd does layers
CREATE_SECONDS = 600  # as much as the API allows
# The first look at a workspace, with the tools: list it, then read all of it.
LOOK = "cd /workspace/* && rg --files --no-ignore | wc -l && rg --no-ignore -c TODO | wc -l && jq --version"


class LocalDisk:
    """What the node has on local disk: an ext4 on a loop device of its own, whose counter shows its writes alone."""

    def __init__(self, folder):
        self.file = pathlib.Path(folder) / "local.img"
        self.mnt = pathlib.Path(folder) / "local"
        self.device = None

    def __enter__(self):
        self.mnt.mkdir(parents=True, exist_ok=True)
        with open(self.file, "wb") as file:
            file.truncate(DISK_BYTES)
        output = subprocess.check_output(["losetup", "--find", "--show", "--direct-io=on", self.file])
        self.device = output.decode().strip()
        # No lazy initialisation: it would write later.
        subprocess.run(["mkfs.ext4", "-q", "-N", "600000", "-E", "lazy_itable_init=0,lazy_journal_init=0", self.device], check=True)
        subprocess.run(["mount", "-o", "noatime,discard", self.device, self.mnt], check=True)
        return self

    def __exit__(self, *_):
        if self.device is None:
            return
        subprocess.run(["umount", self.mnt], check=False)
        subprocess.run(["losetup", "--detach", self.device], check=True)
        self.file.unlink()
        self.mnt.rmdir()

    def written(self):
        """Bytes written so far, those included that still wait in memory (iostats.rst: field 7, sectors of 512)."""
        # The writable layers are a file system in a file of this one: its sync makes pages of that file dirty.
        os.sync()
        os.sync()
        stat = pathlib.Path("/sys/block", self.device.split("/")[-1], "stat").read_text(encoding="ascii")
        return int(stat.split()[6]) * 512


class Bench:
    """A MooseFS with the images on it, and a local disk; measures one way of running tasks after the other."""

    def __init__(self, build, folder, images, tasks):
        self.build = build
        self.folder = pathlib.Path(folder)
        self.images = workloads.images(images)
        self.tasks = tasks
        self.cluster = MooseFs(self.folder / "moosefs", nice=os.nice(0))
        self.disk = LocalDisk(self.folder)
        self.set = image_set.ImageSet(build, self.cluster.mnt, self.folder)

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.stop)
            self.cluster.start()
            self.set.prepare(self.images)
            stack.enter_context(self.disk)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def forget(self):
        """No page of any file is in memory, neither in the kernel nor in the MooseFS client."""
        self.cluster.remount()
        os.sync()
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")

    def fetched(self):
        """Bytes that the present MooseFS client has handed to the kernel: file data nearly alone, its other replies are
        some 100 bytes each (proc(5), io, wchar: writes to /dev/fuse)."""
        lines = pathlib.Path(f"/proc/{self.cluster.client.pid}/io").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("wchar:")))

    @contextlib.asynccontextmanager
    async def node(self, layers):
        """A new node over a layer store: (node, client)."""
        import support
        from libdsec import DSecClient

        folder = self.disk.mnt / "node"
        folder.mkdir()
        run = pathlib.Path("/run", f"dsec-burst-{os.getpid()}")  # a socket's path must be short
        node = support.Node(folder, layers, f"burst{os.getpid()}", scratch_bytes=SCRATCH_BYTES)
        node.run = run
        try:
            node.start(seconds=60)
            async with DSecClient(node.url, node.key) as client:
                yield node, client
        finally:
            if node.process is not None and node.process.poll() is None:
                node.stop()
            purged = node.purge()
            left = support.host_things(node.node_id)
            support.remove_tree(folder)
            support.remove_tree(run)
            if purged.returncode != 0 or left:
                raise RuntimeError(f"left on the host: {left}; purge said {purged.stdout!r} {purged.stderr!r}")

    async def burst(self, layers, ready=None):
        """All tasks over a layer store; `ready` is awaited for an image before its first sandbox is made. Returns
        {seconds, first_seconds, written, fetched, create_seconds, command_seconds, cpu_seconds}: the time until all are done and
        until the first is, the medians of a creation and of a command, the CPU time of all commands."""
        commands = asyncio.Semaphore(COMMANDS_AT_ONCE)
        creates, runs, ends, processor = [], [], [], []

        async def task(client, image):
            if ready is not None:
                await ready(image)
            started = time.perf_counter()
            box = await client.run_container(task_args(image), timeout=CREATE_SECONDS)
            creates.append(time.perf_counter() - started)
            async with commands:
                began = time.perf_counter()
                result = await box.run_shell(image.project.script, cwd=f"/workspace/{image.project.name}", timeout=900)
                ends.append(time.perf_counter())
                runs.append(ends[-1] - began)
            await box.stop()
            check(image, result)
            processor.append(result.user_time + result.system_time)

        async with self.node(layers) as (_, client):
            before, sent = self.disk.written(), self.fetched()
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(self.tasks):
                    group.create_task(task(client, self.images[number % len(self.images)]))
            seconds = time.perf_counter() - started
            return {"seconds": seconds, "first_seconds": min(ends) - started, "written": self.disk.written() - before,
                    "fetched": self.fetched() - sent, "create_seconds": statistics.median(creates),
                    "command_seconds": statistics.median(runs), "cpu_seconds": sum(processor)}

    async def on_demand(self):
        self.forget()
        return await self.burst(self.set.layers)

    async def full_pull(self):
        """Leaves the layers on the local disk."""
        self.remove_local()
        self.forget()
        puller = Puller(self)
        try:
            measured = await self.burst(self.local_layers, puller.image)
        finally:
            await puller.close()
        return {**measured, "pull_seconds": puller.last - puller.first, "pulled": puller.pulled}

    async def all_local(self):
        self.forget()
        return await self.burst(self.local_layers)

    @property
    def local_layers(self):
        return self.disk.mnt / "layers"

    def remove_local(self):
        """What was pulled goes, and the host gets its space back."""
        import support

        support.remove_tree(self.local_layers)
        support.remove_tree(self.disk.mnt / "pull")
        subprocess.run(["fstrim", self.disk.mnt], check=True)

    async def touched(self):
        """{language: {image_mib, fetched_mib, share}}: what one task of the first image of a language reads of it, everything
        cold and alone."""
        sizes = self.set.sizes()
        table = {}
        for image in self.images[: len(workloads.LANGUAGES)]:
            self.forget()
            async with self.node(self.set.layers) as (_, client):
                before = self.fetched()
                started = time.perf_counter()
                box = await client.run_container(task_args(image), timeout=300)
                result = await box.run_shell(image.project.script, cwd=f"/workspace/{image.project.name}", timeout=900)
                seconds = time.perf_counter() - started
                await box.stop()
                check(image, result)
                fetched = self.fetched() - before
                size = sum(sizes[name] for name in image.layers)
                table[image.language] = {"image_mib": round(size / 2**20, 1), "fetched_mib": round(fetched / 2**20, 1),
                                         "share": round(fetched / size, 3), "seconds": round(seconds, 2)}
        return table

    async def look(self, toolkits, script):
        """256 (tasks) sandboxes: created at once, each looks at its workspace; all live until the last has answered, then what
        they wrote is on the disk. `toolkits` gives the layers over the base for an image."""
        commands = asyncio.Semaphore(COMMANDS_AT_ONCE)
        answers = collections.defaultdict(set)

        async def task(client, image):
            workspace, names = toolkits(image)
            box = await client.run_container(task_args(image, workspace=workspace, toolkits=names), timeout=CREATE_SECONDS)
            async with commands:
                result = await box.run_shell(script, timeout=900)
            check(image, result)
            answers[image.project.name].add(result.stdout)
            return box

        self.forget()
        async with self.node(self.set.layers) as (_, client):
            before = self.disk.written()
            started = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(task(client, self.images[number % len(self.images)])) for number in range(self.tasks)]
            seconds = time.perf_counter() - started
            written = self.disk.written() - before
            await asyncio.gather(*(running.result().stop() for running in tasks))
        return {"seconds": seconds, "written": written}, {name: sorted(texts) for name, texts in answers.items()}

    async def workspace_layers(self):
        return await self.look(lambda image: (image.project.layer, ["bench-tools:1"]), LOOK)

    async def workspace_archives(self):
        unpack = "tar -xzf /archives/tools.tar.gz -C / && tar -xzf /archives/workspace.tar.gz -C / && "
        return await self.look(lambda image: (None, [image_set.archive_layer(image.project)]), unpack + LOOK)


class Puller:
    """The full pull: skopeo copies an image from the shared root to the local disk, then each layer is unpacked. A layer that
    several images share is copied once and unpacked once; PULLS_AT_ONCE images are at work; tasks of an image start as soon
    as it is there.

    To unpack is `dsec layer build` of the tar.gz into the local store, which the tasks then run from: what tar writes as files
    it writes as one file, with digests (bench/README.md compares the two)."""

    def __init__(self, bench):
        self._bench = bench
        self._blobs = bench.disk.mnt / "pull" / "blobs"
        self._blobs.mkdir(parents=True)
        self._unpacked = set()
        self._locks = collections.defaultdict(asyncio.Lock)
        self._turns = asyncio.Semaphore(PULLS_AT_ONCE)
        self._images = {}
        self.first = time.perf_counter()
        self.last = self.first
        self.pulled = 0

    async def image(self, image):
        """Returns when the image is on the local disk."""
        if image.ref not in self._images:
            self._images[image.ref] = asyncio.ensure_future(self._pull(image))
        await asyncio.shield(self._images[image.ref])

    async def close(self):
        """Ends what is still under way."""
        for pull in self._images.values():
            pull.cancel()
        await asyncio.gather(*self._images.values(), return_exceptions=True)

    async def _pull(self, image):
        async with contextlib.AsyncExitStack() as stack:
            for name in image.layers:  # base, workspace, extra: always in this order
                await self._locks[name].acquire()
                if name in self._unpacked:
                    self._locks[name].release()
                else:
                    stack.callback(self._locks[name].release)
            async with self._turns:
                folder = self._blobs.parent / image.ref
                await run("skopeo", "copy", "--quiet", "--insecure-policy", "--dest-shared-blob-dir", self._blobs,
                          f"oci:{self._bench.set.oci}:{image.ref}", f"oci:{folder}:{image.ref}")
                for kind, name in zip(("base", "workspace", "toolkit"), image.layers):
                    if name not in self._unpacked:
                        blob = self._blobs / self._bench.set.made(name)["digest"].replace(":", "/")
                        await run(self._bench.set.dsec, "layer", "build", "--layers", self._bench.local_layers, "--kind", kind,
                                  "--name", name, "--from-tar", blob)
                        self._unpacked.add(name)
                        self.pulled += blob.stat().st_size
        self.last = time.perf_counter()


async def run(*words):
    """Runs a program to success."""
    process = await asyncio.create_subprocess_exec(*map(str, words), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                                                   stderr=asyncio.subprocess.STDOUT)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:  # cancelled
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))} ended with {process.returncode}: {output.decode(errors='replace')}")


def task_args(image, **overrides):
    """One core, 1 GiB, 1 GiB of disk: what such tasks are usually given."""
    from libdsec import DSecContainerRunArgs

    values = dict(container_image=image.base, workspace=image.project.layer, toolkits=[image.extra], memory_limit_mb=1024,
                  cpu_cores_limit=1, pids_limit=512, disk_limit_mb=1024)
    values.update(overrides)
    return DSecContainerRunArgs(**values)


def check(image, result):
    if not result.ok:
        raise RuntimeError(f"{image.language}, {image.project.name} over {image.packages}: {result!r}\n"
                           f"{result.stdout[-2000:].decode(errors='replace')}\n{result.stderr[-2000:].decode(errors='replace')}")


def mib(value):
    return value / 2**20


def medians(runs):
    """The medians of the numbers of several runs, and the seconds of each."""
    values = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {**values, "all_seconds": [round(run["seconds"], 2) for run in runs]}


def rounded(measured):
    """For the detail of a figure: MiB instead of bytes."""
    out = {}
    for key, value in measured.items():
        if key in ("written", "fetched", "pulled"):
            out[key + "_mib"] = round(mib(value), 1)
        else:
            out[key] = value if isinstance(value, list) else round(value, 3)
    return out


async def bench_bursts(figures, build, wanted, images=64, tasks=256, runs=1, folder=ROOT / "build" / "bench"):
    """Measures those of FIGURES that are wanted. Of each pair (time, writes) both come from the same runs."""
    with Bench(build, folder, images, tasks) as bench:
        size = {"images": images, "tasks": tasks, "runs": runs}
        if wanted & {"burst_time", "burst_writes"}:
            touched = await bench.touched()
            ways = {"full_pull": [], "all_local": [], "on_demand": []}
            for number in range(runs):
                # In turns, on demand last and first, so that all see the same machine; all local has what the full pull left.
                order = ["full_pull", "all_local"]
                order.insert(0 if number % 2 else 2, "on_demand")
                for name in order:
                    ways[name].append(await getattr(bench, name)())
            bench.remove_local()
            pulled, local, demand = (medians(ways[name]) for name in ("full_pull", "all_local", "on_demand"))
            detail = {"on_demand": rounded(demand), "full_pull": rounded(pulled), "all_local": rounded(local), **size}
            if "burst_time" in wanted:
                figures.add("burst_time", demand["seconds"], "s", pulled["seconds"], pulled["seconds"] / demand["seconds"],
                            over_all_local=round(demand["seconds"] / local["seconds"], 3), touched=touched, **detail)
            if "burst_writes" in wanted:
                figures.add("burst_writes", mib(demand["written"]), "MiB", mib(pulled["written"]), pulled["written"] / demand["written"],
                            less=round(1 - demand["written"] / pulled["written"], 3), **detail)
        if wanted & {"workspace_time", "workspace_writes"}:
            ways = {"workspace_layers": [], "workspace_archives": []}
            for _ in range(runs):
                answers = []
                for name, values in ways.items():
                    measured, seen = await getattr(bench, name)()
                    values.append(measured)
                    answers.append(seen)
                if answers[0] != answers[1]:
                    raise RuntimeError(f"the two ways show different workspaces: {answers}")
            layers, archives = (medians(values) for values in ways.values())
            detail = {"layers": rounded(layers), "archives": rounded(archives), **size}
            if "workspace_time" in wanted:
                figures.add("workspace_time", layers["seconds"], "s", archives["seconds"], archives["seconds"] / layers["seconds"], **detail)
            if "workspace_writes" in wanted:
                figures.add("workspace_writes", mib(layers["written"]), "MiB", mib(archives["written"]),
                            archives["written"] / layers["written"], **detail)


def add_arguments(parser):
    """The scale of the bursts."""
    parser.add_argument("--images", type=int, default=64, help="distinct images of the bursts, at most 65")
    parser.add_argument("--tasks", type=int, default=256, help="tasks of the bursts")
    parser.add_argument("--runs", type=int, default=1, help="repeats of each burst, in turns")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release")
    parser.add_argument("--only", default="", help=", ".join(FIGURES))
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "bench" / "bursts.jsonl")
    add_arguments(parser)
    arguments = parser.parse_args()
    os.environ["DSEC_BUILD"] = str(arguments.build.resolve())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is on the host goes then, too
    from run import Figures

    wanted = set(filter(None, arguments.only.split(","))) or set(FIGURES)
    if wanted - set(FIGURES):
        sys.exit(f"unknown figures: {', '.join(sorted(wanted - set(FIGURES)))}")
    asyncio.run(bench_bursts(Figures(arguments.out), arguments.build.resolve(), wanted, arguments.images, arguments.tasks, arguments.runs))


if __name__ == "__main__":
    main()
