#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The judge of the demo; runs inside a fresh sandbox, standard library only.

    judge.py TASK_JSON AGENT_DIFF

Applies the part of the diff that changes the project's own code (`editable` in task.json, less its tests), runs the project's
suite and prints one JSON line: {"reward": 0.0 or 1.0, "passed": n, "failing": [...], "refused": [paths], "reason": text}. The
reward is 1 only if the suite ran, nothing failed and every test that the bug had broken passed. A diff that names a path
outside the project, or that is not a plain recursive diff, is refused whole. The code under test runs in the judge's own
sandbox: a change that attacks the test run from inside the project's modules is beyond what this judge can see.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def verdict(reward, reason, **facts):
    print(json.dumps({"reward": reward, "reason": reason, **facts}))
    sys.exit(0)


class BadDiff(Exception):
    """The diff is not what agent.py writes."""


def inner_path(line):
    """The path of a `--- a/...` or `+++ b/...` line, without the first folder."""
    name = line[4:].split("\t", 1)[0].rstrip("\n")
    path = posixpath.normpath(name.split("/", 1)[1]) if "/" in name else ".."
    if name.startswith(('"', "/")) or path == "." or path.startswith(("..", "/")):
        raise BadDiff("diff leads outside the project")
    return path


def split(diff):
    """Returns [(path, text)] for each changed file. Hunks are counted, so that no line of content is taken for a header."""
    parts = []
    lines = re.findall(r"[^\n]*\n|[^\n]+\Z", diff)
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- "):
            at += 1
            continue
        if at + 1 == len(lines) or not lines[at + 1].startswith("+++ "):
            raise BadDiff("malformed diff")
        path = inner_path(lines[at])
        if inner_path(lines[at + 1]) != path:
            raise BadDiff("malformed diff")
        start, at = at, at + 2
        while at < len(lines) and (hunk := HUNK.match(lines[at])):
            old, new = (int(count) if count is not None else 1 for count in hunk.groups())
            at += 1
            while (old or new) and at < len(lines):
                kind = lines[at][:1]
                old -= kind in (" ", "-")
                new -= kind in (" ", "+")
                if kind not in (" ", "-", "+", "\\") or old < 0 or new < 0:
                    raise BadDiff("malformed diff")
                at += 1
            if old or new:
                raise BadDiff("malformed diff")
            if at < len(lines) and lines[at].startswith("\\"):
                at += 1
        parts.append((path, "".join(lines[start:at])))
    return parts


def under(path, prefixes):
    return any(path == prefix or path.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)


def is_allowed(path, task):
    """True for the project's own code. Anything else could steer the test run: the suite itself and its settings, and also a
    new pytest.py or sitecustomize.py at the top, which Python would import before the real one."""
    return under(path, task["editable"]) and not under(path, task["test_paths"]) and posixpath.basename(path) != "conftest.py"


def main():
    task_file, diff_file = sys.argv[1:]
    with open(task_file, encoding="utf-8") as file:
        task = json.load(file)
    if not task["fail_to_pass"]:
        sys.exit("task.json names no test that the bug breaks")
    with open(diff_file, encoding="utf-8", errors="surrogateescape", newline="") as file:
        diff = file.read()
    try:
        parts = split(diff)
    except BadDiff as error:
        verdict(0.0, str(error))
    refused = [path for path, _ in parts if not is_allowed(path, task)]
    text = "".join(text for path, text in parts if is_allowed(path, task))
    if text:
        applied = subprocess.run(["patch", "-s", "-f", "--no-backup-if-mismatch", "-p1", "-d", task["workdir"]], input=text.encode("utf-8", "surrogateescape"))
        if applied.returncode != 0:
            verdict(0.0, "diff does not apply", refused=refused)
    report = os.path.join(tempfile.mkdtemp(), "junit.xml")
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **task["env"])
    try:
        subprocess.run(task["test"] + ["--tb=no", "--assert=plain", f"--junitxml={report}", "-o", "junit_family=xunit1"], cwd=task["workdir"],
                       env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=task["time_limit_s"])
    except subprocess.TimeoutExpired:
        verdict(0.0, f"the suite took more than {task['time_limit_s']} s", refused=refused)
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
