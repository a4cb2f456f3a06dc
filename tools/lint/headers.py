#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every header under src/ compiles alone (with the flags of its folder's own sources), starts with the
licence line and `#pragma once`. Results are cached by content in the build folder."""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def folder_flags(build):
    """Returns {folder under src/: compile flags of one of its sources}."""
    flags = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        try:
            relative = path.resolve().relative_to(ROOT / "src")
        except ValueError:
            continue
        words = shlex.split(entry["command"])
        while words and not pathlib.Path(words[0]).name.startswith("clang"):
            words.pop(0)
        kept = []
        skip = False
        for word in words:
            if skip:
                skip = False
            elif word in ("-o", "-c", "-MF", "-MT", "-MQ"):
                skip = True
            elif word not in ("-MD", "-MMD") and not word.endswith(".cc"):
                kept.append(word)
        key = relative.parts[0]
        if "_static.dir" not in entry["command"] or key not in flags:
            if key not in flags or len(kept) > len(flags[key]):
                flags[key] = kept
    return flags


def check(header, flags, cache):
    """Returns an error text or None."""
    text = header.read_text(encoding="utf-8")
    relative = header.relative_to(ROOT)
    if not text.startswith("// SPDX-License-Identifier: Apache-2.0\n"):
        return f"{relative}: first line is not the licence line"
    if "#pragma once" not in text:
        return f"{relative}: no #pragma once"
    command = flags + ["-x", "c++", "-fsyntax-only", "-Wno-pragma-once-outside-header", "-Wno-unused-function", str(header)]
    process = subprocess.run(command + ["-M"], capture_output=True, text=True)
    digest = hashlib.sha256(" ".join(flags).encode())
    for dependency in process.stdout.replace("\\\n", " ").split()[1:]:
        if dependency.startswith("/usr/"):
            continue
        try:
            digest.update(pathlib.Path(dependency).read_bytes())
        except OSError:
            digest.update(dependency.encode())
    stamp = cache / digest.hexdigest()
    if process.returncode == 0 and stamp.exists():
        return None
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode != 0:
        return f"{relative}: does not compile alone\n{process.stderr[:2000]}"
    stamp.touch()
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    cache = arguments.build / "header-check"
    cache.mkdir(exist_ok=True)
    flags = folder_flags(arguments.build)
    headers = [h for h in sorted((ROOT / "src").rglob("*.h"))]
    errors = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {}
        for header in headers:
            folder = header.relative_to(ROOT / "src").parts[0]
            if folder not in flags:
                errors.append(f"{header.relative_to(ROOT)}: folder {folder} has no compiled source")
                continue
            jobs[pool.submit(check, header, flags[folder], cache)] = header
        for job in concurrent.futures.as_completed(jobs):
            if job.result():
                errors.append(job.result())
    print("\n".join(sorted(errors)) if errors else f"headers: {len(headers)} compile alone")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
