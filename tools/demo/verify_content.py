#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the demo's tasks without the platform, in overlay mounts and chroot: the unmodified suite passes, the bug breaks
tests, the right patch earns 1 and each wrong one 0. `--record` writes the list of broken tests into task.json.

    tools/demo/verify_content.py [--record] [--cache build/demo] [NAME ...]
"""

import argparse
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "demo" / "tasks"


@contextlib.contextmanager
def root_of(cache, name):
    """A writable root of base, workspace and toolkit; gone afterwards."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="dsec-demo-"))
    merged = folder / "merged"
    for part in ("upper", "work", "merged"):
        (folder / part).mkdir()
    lower = f"{cache / 'toolkit'}:{cache / 'workspaces' / name}:{cache / 'base'}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o",
                    f"lowerdir={lower},upperdir={folder / 'upper'},workdir={folder / 'work'}", merged], check=True)
    try:
        subprocess.run(["mknod", "-m", "666", merged / "dev" / "null", "c", "1", "3"], check=True)
        yield merged
    finally:
        subprocess.run(["umount", merged], check=True)
        shutil.rmtree(folder)


def inside(root, *argv, env=None):
    """Runs a command in the chroot; returns stdout."""
    words = ["chroot", root, "env", "-i", "PATH=/usr/bin:/bin", "HOME=/root"]
    words += [f"{key}={value}" for key, value in (env or {}).items()]
    return subprocess.run([*words, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def suite(root, task):
    """Runs the suite; returns (set of passed, set of failed)."""
    command = ["sh", "-c", 'cd "$0" && exec "$@"', task["workdir"], *task["test"], "--tb=no", "--junitxml=/tmp/j.xml", "-o",
               "junit_family=xunit1"]
    done = inside(root, *command, env={"PYTHONDONTWRITEBYTECODE": "1", **task["env"]})
    report = root / "tmp" / "j.xml"
    if not report.exists():
        sys.exit(f"{task['name']}: the suite did not run:\n{done.stdout[-2000:]}")
    passed, failed = set(), set()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif case.find("skipped") is None:
            passed.add(name)
    return passed, failed


def check(task, cache, record):
    """Returns a list of faults."""
    name = task["name"]
    folder = TASKS / name
    faults = []
    started = time.monotonic()
    with root_of(cache, name) as root:
        subprocess.run(["patch", "-s", "-R", "-p1", "-d", root / task["workdir"].lstrip("/"), "-i", folder / "bug.patch"], check=True)
        passed, failed = suite(root, task)
        if failed:
            faults.append(f"unmodified suite fails: {sorted(failed)}")
    seconds = time.monotonic() - started
    with root_of(cache, name) as root:
        _, broken = suite(root, task)
        if not broken:
            faults.append("the bug breaks nothing")
        if record:
            task["fail_to_pass"] = sorted(broken)
            (folder / "task.json").write_text(json.dumps(task, indent=2) + "\n", encoding="utf-8")
        elif sorted(broken) != task["fail_to_pass"]:
            faults.append(f"broken tests differ from task.json: {sorted(broken)}")
    rewards = {}
    for candidate in sorted((folder / "candidates").glob("*.patch")):
        with root_of(cache, name) as root:
            shutil.copy(folder / "task.json", root / "tmp" / "task.json")
            shutil.copy(candidate, root / "tmp" / "candidate.patch")
            done = inside(root, "python3", "/opt/dsec-agent/agent.py", "/tmp/task.json", "/tmp/candidate.patch", "/tmp/agent.diff")
            if done.returncode != 0:
                faults.append(f"{candidate.name}: agent failed: {done.stdout[-500:]}")
                continue
            diff = (root / "tmp" / "agent.diff").read_bytes()
        with root_of(cache, name) as root:
            shutil.copy(folder / "task.json", root / "tmp" / "task.json")
            (root / "tmp" / "agent.diff").write_bytes(diff)
            done = inside(root, "python3", "/opt/dsec-agent/judge.py", "/tmp/task.json", "/tmp/agent.diff")
            verdict = json.loads(done.stdout.splitlines()[-1])
            rewards[candidate.stem] = verdict["reward"]
            if verdict["reward"] != (1.0 if candidate.stem == "right" else 0.0):
                faults.append(f"{candidate.name}: reward {verdict}")
    print(f"{name:<18}{len(passed):>6} tests {seconds:6.1f} s  broken {len(broken):>3}  rewards {rewards}", flush=True)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--cache", type=pathlib.Path, default=ROOT / "build" / "demo")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    scripts = ROOT / "tools" / "demo"
    subprocess.run([scripts / "build_base.sh", arguments.cache / "base"], check=True)
    subprocess.run([scripts / "build_toolkit.sh", arguments.cache / "toolkit"], check=True)
    bad = False
    for folder in sorted(TASKS.iterdir()):
        if arguments.names and folder.name not in arguments.names:
            continue
        task = json.loads((folder / "task.json").read_text(encoding="utf-8"))
        subprocess.run([scripts / "build_workspace.sh", folder.name, arguments.cache / "workspaces" / folder.name], check=True)
        for fault in check(task, arguments.cache, arguments.record):
            bad = True
            print(f"{folder.name}: {fault}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
