#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo's driver: 64 agent tasks in sandboxes made from layers, rewards from fresh sandboxes. Written on libdsec alone.

    run.py [--tasks 64]        endpoint and key as libdsec finds them (DSEC_URL, DSEC_API_KEY ...)

For each task: a sandbox of base + workspace (a project with one bug) + toolkit (pytest and the scripted agent); the agent
works with one candidate patch; its diff is judged in a second, fresh sandbox of the same layers.
"""

import argparse
import asyncio
import json
import os
import pathlib
import sys
import time

from libdsec import DSecClient, DSecContainerRunArgs, DSecError

TASKS = pathlib.Path(__file__).resolve().parent / "tasks"
BASE, TOOLKIT = "debian:12", "agent:1"
LABELS = {"demo": "agent-tasks"}


def percentile(values, share):
    """The value below which `share` of the values lie; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def host_io():
    """(bytes read, bytes written) by the host's block devices since boot: pgpgin and pgpgout of /proc/vmstat, in KiB."""
    facts = dict(line.split() for line in pathlib.Path("/proc/vmstat").read_text(encoding="ascii").splitlines())
    return int(facts["pgpgin"]) * 1024, int(facts["pgpgout"]) * 1024


class Progress:
    """One line that is rewritten on a terminal, one line per ten tasks elsewhere."""

    def __init__(self, total):
        self.total, self.created, self.worked, self.judged = total, 0, 0, 0
        self._shown = -1

    def show(self):
        text = f"created {self.created}/{self.total}  agent done {self.worked}/{self.total}  judged {self.judged}/{self.total}"
        if sys.stdout.isatty():
            print(f"\r{text}", end="\n" if self.judged == self.total else "", flush=True)
        elif (self.created + self.worked + self.judged) // 10 > self._shown:
            self._shown = (self.created + self.worked + self.judged) // 10
            print(text, flush=True)


def plan(count):
    """The first `count` (project, candidate) pairs, going round."""
    pairs = []
    for name in ("right", "wrong_1", "wrong_2"):
        for folder in sorted(path for path in TASKS.iterdir() if path.is_dir()):
            pairs.append((folder, name))
    return [pairs[i % len(pairs)] for i in range(count)]


def make_args(project):
    return DSecContainerRunArgs(
        container_image=BASE, workspace=f"{project}:bug", toolkits=[TOOLKIT], memory_limit_mb=512, cpu_cores_limit=1,
        pids_limit=128, disk_limit_mb=256, ttl=900, ttl_running_stop=300, labels=LABELS,
    )


async def work(box, folder, candidate, times):
    """Runs the agent; returns its diff."""
    await box.files.write("/tmp/task.json", (folder / "task.json").read_bytes())
    await box.files.write("/tmp/candidate.patch", (folder / "candidates" / f"{candidate}.patch").read_bytes())
    result = await box.exec(["python3", "/opt/dsec-agent/agent.py", "/tmp/task.json", "/tmp/candidate.patch", "/tmp/agent.diff"],
                            timeout=120)
    result.check()
    times["agent"].append(result.wall_time)
    return json.loads(result.text.splitlines()[-1]), await box.files.read("/tmp/agent.diff")


async def judge(client, folder, diff, times):
    """Judges a diff in a fresh sandbox; returns the verdict and the sandbox's usage."""
    async with await client.run_container(make_args(folder.name)) as box:
        times["phases"].append(box.info["phases"])
        await box.files.write("/tmp/task.json", (folder / "task.json").read_bytes())
        await box.files.write("/tmp/agent.diff", diff)
        result = await box.exec(["python3", "/opt/dsec-agent/judge.py", "/tmp/task.json", "/tmp/agent.diff"], timeout=120)
        result.check()
        times["judge"].append(result.wall_time)
        return json.loads(result.text.splitlines()[-1]), (await box.stats())["usage"]


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=64)
    arguments = parser.parse_args()
    todo = plan(arguments.tasks)
    progress = Progress(len(todo))
    times = {"agent": [], "judge": [], "phases": []}
    rows, written = [], 0
    read_before, write_before = host_io()
    started = time.monotonic()
    async with DSecClient() as client:
        boxes = {}

        async def burst(project, count):
            async for item in client.run_many(make_args(project), count):
                if isinstance(item, DSecError):
                    raise item
                boxes.setdefault(project, []).append(item)
                times["phases"].append(item.info["phases"])
                progress.created += 1
                progress.show()

        counts = {}
        for folder, _ in todo:
            counts[folder.name] = counts.get(folder.name, 0) + 1
        await asyncio.gather(*(burst(project, count) for project, count in counts.items()))
        burst_seconds = time.monotonic() - started
        # More than there are cores: a task also waits for creations and removals.
        slots = asyncio.Semaphore(6 * (os.cpu_count() or 1))

        async def one(number, folder, candidate):
            nonlocal written
            async with slots:
                async with boxes[folder.name].pop() as box:
                    report, diff = await work(box, folder, candidate, times)
                    written += (await box.stats())["usage"]["disk_bytes"]
                progress.worked += 1
                progress.show()
                verdict, usage = await judge(client, folder, diff, times)
                written += usage["disk_bytes"]
                progress.judged += 1
                progress.show()
                rows.append((number, folder.name, candidate, report, verdict))

        try:
            await asyncio.gather(*(one(number, *pair) for number, pair in enumerate(todo)))
        finally:
            left = [record async for record in client.delete_by_label(LABELS)]
    read_after, write_after = host_io()
    seconds = time.monotonic() - started

    print(f"\n{'task':>4}  {'project':<18}{'candidate':<10}{'failing before':>15}{'after':>7}{'reward':>8}  verdict")
    wrong = []
    for number, project, candidate, report, verdict in sorted(rows):
        before, after = report["failing_before"] or [], report["failing_after"] or []
        print(f"{number:>4}  {project:<18}{candidate:<10}{len(before):>15}{len(after):>7}{verdict['reward']:>8.1f}  {verdict['reason']}")
        if verdict["reward"] != (1.0 if candidate == "right" else 0.0):
            wrong.append(number)
    print(f"\n{'milliseconds':<24}{'p50':>10}{'p99':>10}")
    names = [phase["phase"] for phase in times["phases"][0]]
    for name in names:
        values = [p["micros"] / 1e3 for phases in times["phases"] for p in phases if p["phase"] == name]
        print(f"{'create: ' + name:<24}{percentile(values, 0.5):>10.2f}{percentile(values, 0.99):>10.2f}")
    totals = [sum(p["micros"] for p in phases) / 1e3 for phases in times["phases"]]
    print(f"{'create: total':<24}{percentile(totals, 0.5):>10.2f}{percentile(totals, 0.99):>10.2f}")
    for name in ("agent", "judge"):
        values = [value * 1e3 for value in times[name]]
        print(f"{'command: ' + name:<24}{percentile(values, 0.5):>10.0f}{percentile(values, 0.99):>10.0f}")
    print(f"\n{len(rows)} tasks in {seconds:.1f} s; burst of {len(todo)} creations in {burst_seconds:.2f} s; mean reward "
          f"{sum(row[4]['reward'] for row in rows) / len(rows):.3f}")
    print(f"sandboxes wrote {written / 2**20:.1f} MiB; host block devices read {(read_after - read_before) / 2**20:.1f} MiB and "
          f"wrote {(write_after - write_before) / 2**20:.1f} MiB meanwhile (all processes)")
    if wrong or left:
        sys.exit(f"unexpected rewards in tasks {wrong}; sandboxes left: {left}")


if __name__ == "__main__":
    asyncio.run(main())
