#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every header under src/ compiles alone, and starts with the licence line and `#pragma once`.

A header that is the first include of a source compiled without precompiled headers is proven by the build itself. The
others are compiled here, each from a source that includes nothing else, with the flags of its folder's own sources."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def read_sources(build):
    """Returns ({folder under src/: compile flags of one of its sources}, names of the headers some source includes first)."""
    flags = {}
    proven = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"]).resolve()
        if not path.is_relative_to(ROOT / "src"):
            continue
        first = re.search(r'^#include (.*)$', path.read_text(encoding="utf-8"), re.MULTILINE)
        if first and "cmake_pch" not in entry["command"]:
            proven.add(first[1].strip('"'))
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
            elif word == "-Xclang":  # only ever used for the precompiled headers
                skip = True
            elif word not in ("-MD", "-MMD") and not word.endswith(".cc"):
                kept.append(word)
        folder = path.relative_to(ROOT / "src").parts[0]
        if len(kept) > len(flags.get(folder, [])):
            flags[folder] = kept
    return flags, proven


def check_text(header):
    """Returns an error text or None."""
    text = header.read_text(encoding="utf-8")
    relative = header.relative_to(ROOT)
    if not text.startswith("// SPDX-License-Identifier: Apache-2.0\n"):
        return f"{relative}: first line is not the licence line"
    if "#pragma once" not in text:
        return f"{relative}: no #pragma once"
    return None


def compile_alone(header, flags):
    """Returns an error text or None."""
    process = subprocess.run(flags + ["-x", "c++", "-fsyntax-only", "-"], capture_output=True, text=True,
                             input=f'#include "{header.relative_to(ROOT / "src")}"\n')
    if process.returncode != 0:
        return f"{header.relative_to(ROOT)}: does not compile alone\n{process.stderr[:2000]}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    flags, proven = read_sources(arguments.build)
    headers = sorted((ROOT / "src").rglob("*.h"))
    errors = [error for error in map(check_text, headers) if error]
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for header in headers:
            name = header.relative_to(ROOT / "src")
            if str(name) in proven:
                continue
            if name.parts[0] not in flags:
                errors.append(f"{header.relative_to(ROOT)}: folder {name.parts[0]} has no compiled source")
                continue
            jobs.append(pool.submit(compile_alone, header, flags[name.parts[0]]))
    errors += [job.result() for job in jobs if job.result()]
    print("\n".join(sorted(errors)) if errors else f"headers: {len(headers)} compile alone, {len(jobs)} of them tried here")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
