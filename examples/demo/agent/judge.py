#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The judge of the demo; runs inside a fresh sandbox, standard library only.

    judge.py TASK_JSON AGENT_DIFF

Applies the part of the diff that touches no test, runs the project's own suite and prints one JSON line:
{"reward": 0.0 or 1.0, "passed": n, "failing": [...], "refused": [paths], "reason": text}. The reward is 1 only if the suite
ran, nothing failed and every test that the bug had broken passed. A diff that names a path outside the project is refused
whole.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

PART = re.compile(r"^diff -ruN[^\n]* (\S+) (\S+)\n", re.MULTILINE)


def verdict(reward, reason, **facts):
    print(json.dumps({"reward": reward, "reason": reason, **facts}))
    sys.exit(0)


def split(diff):
    """Returns [(path, text)] for each file of a recursive diff; path is None when it leads outside."""
    places = [match.start() for match in PART.finditer(diff)] + [len(diff)]
    parts = []
    for start, end in zip(places, places[1:]):
        text = diff[start:end]
        names = re.findall(r"^(?:---|\+\+\+) (\S+)", text, re.MULTILINE)
        paths = set()
        for name in names:
            path = posixpath.normpath(name.split("/", 1)[1]) if "/" in name else ".."
            paths.add(None if path.startswith(("..", "/")) else path)
        parts.append((paths.pop() if len(paths) == 1 else None, text))
    return parts


def is_test(path, task):
    """True for files that belong to the suite: the agent may not change those."""
    return any(path == prefix or path.startswith(prefix.rstrip("/") + "/") for prefix in task["test_paths"]) or \
        posixpath.basename(path) in ("conftest.py", "pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml")


def main():
    task_file, diff_file = sys.argv[1:]
    with open(task_file, encoding="utf-8") as file:
        task = json.load(file)
    with open(diff_file, encoding="utf-8", errors="surrogateescape") as file:
        parts = split(file.read())
    if any(path is None for path, _ in parts):
        verdict(0.0, "diff leads outside the project")
    refused = [path for path, _ in parts if is_test(path, task)]
    text = "".join(text for path, text in parts if not is_test(path, task))
    if text:
        applied = subprocess.run(["patch", "-s", "-f", "--no-backup-if-mismatch", "-p1", "-d", task["workdir"]], input=text.encode("utf-8", "surrogateescape"))
        if applied.returncode != 0:
            verdict(0.0, "diff does not apply", refused=refused)
    report = "/tmp/junit.xml"
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **task["env"])
    subprocess.run(task["test"] + ["--tb=no", f"--junitxml={report}", "-o", "junit_family=xunit1"], cwd=task["workdir"],
                   env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    if not os.path.exists(report):
        verdict(0.0, "the suite did not run", refused=refused)
    passed, failing = set(), []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failing.append(name)
        elif case.find("skipped") is None:
            passed.add(name)
    missing = sorted(set(task["fail_to_pass"]) - passed)
    good = not failing and not missing
    reason = "all tests pass" if good else f"{len(failing)} failing, {len(missing)} of the broken ones not repaired"
    verdict(1.0 if good else 0.0, reason, passed=len(passed), failing=sorted(failing)[:20], refused=refused)


if __name__ == "__main__":
    main()
