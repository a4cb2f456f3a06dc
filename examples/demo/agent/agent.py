#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The scripted agent of the demo; runs inside a sandbox, standard library only.

    agent.py TASK_JSON CANDIDATE_PATCH DIFF_OUT

Reads which tests fail (the task names them), applies the candidate patch, runs the project's whole suite and writes the diff of
its work to DIFF_OUT. Prints one JSON line: {"failing_before": [...], "failing_after": [...], "applied": bool}. Exit code 0 when it did
its work, whatever the tests say; the reward is not its to decide.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile


def run_tests(task):
    """Returns the sorted ids of failing tests, or None when the suite did not run at all."""
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", **task["env"])
    done = subprocess.run(task["test"] + ["-rfE", "--tb=no", "--assert=plain"], cwd=task["workdir"], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) and not failing:
        return None
    return sorted(set(failing))


def main():
    task_file, candidate, diff_out = sys.argv[1:]
    with open(task_file, encoding="utf-8") as file:
        task = json.load(file)
    workdir = task["workdir"]
    with tempfile.TemporaryDirectory() as folder:
        pristine = os.path.join(folder, "a")
        shutil.copytree(workdir, pristine, symlinks=True)
        before = sorted(task["fail_to_pass"])
        applied = subprocess.run(["patch", "-s", "-f", "--no-backup-if-mismatch", "-p1", "-d", workdir, "-i", candidate]).returncode == 0
        after = run_tests(task)
        os.symlink(workdir, os.path.join(folder, "b"))
        diff = subprocess.run(["diff", "-ruN", "--exclude=__pycache__", "a", "b/."], cwd=folder, stdout=subprocess.PIPE)
        if diff.returncode > 1:
            sys.exit("diff failed")
        with open(diff_out, "wb") as file:
            file.write(diff.stdout.replace(b"b/./", b"b/"))
    print(json.dumps({"failing_before": before, "failing_after": after, "applied": applied}))


if __name__ == "__main__":
    main()
