#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy with the allow-list of .clang-tidy on every source under src/ and apps/ but those that it has found
nothing in before: tidy_clean.txt beside this program has the digest of each of them, over the source, the headers of
ours that it includes and the allow-list; generated headers and those of others do not count. What is not there is
checked, here and in CI; `--write` adds what was clean, `--all` looks at nothing and checks everything."""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLEAN = pathlib.Path(__file__).with_name("tidy_clean.txt")


def digest_of(entry, configuration):
    """Returns a digest over the source and the headers of ours that it includes, preprocessed, and the configuration, or
    None if it does not preprocess."""
    words = shlex.split(entry["command"])
    while words and not pathlib.Path(words[0]).name.startswith("clang"):
        words.pop(0)
    command = [word for word in words if word not in ("-MD", "-c")]
    if "-o" in command:
        place = command.index("-o")
        del command[place:place + 2]
    # Precompiled headers are read as text.
    for place in reversed([i for i, word in enumerate(command) if word == "-include-pch"]):
        del command[place - 1:place + 3]
    # Targets with precompiled headers need not name the folder of the generated ones.
    command += ["-isystem", str(pathlib.Path(entry["directory"]) / "api" / "gen")]
    process = subprocess.run(command + ["-E"], cwd=entry["directory"], capture_output=True)
    if process.returncode != 0:
        return None
    total = hashlib.sha256(configuration)
    ours = False
    for line in process.stdout.splitlines():
        marker = re.match(rb'# \d+ "([^"]*)"', line)
        if marker:
            ours = any(marker[1].startswith(os.fsencode(ROOT / part)) for part in ("src", "apps"))
        elif ours and line.strip():
            # The tree may lie anywhere.
            total.update(line.replace(os.fsencode(ROOT), b"") + b"\n")
    return total.hexdigest()


def read_clean():
    if not CLEAN.exists():
        return {}
    return {path: digest for digest, path in (line.split() for line in CLEAN.read_text().splitlines())}


def check(entry, build, known, configuration):
    """Returns (digest, whether clang-tidy ran, an error text or None)."""
    digest = digest_of(entry, configuration)
    if digest and digest == known:
        return digest, False, None
    process = subprocess.run(["clang-tidy-19", "-p", str(build), "--quiet", entry["file"]], capture_output=True, text=True)
    if process.returncode != 0:
        return digest, True, process.stdout[:4000] or process.stderr[:4000]
    return digest, True, None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--all", action="store_true", help="check what is known to be clean, too")
    parser.add_argument("--write", action="store_true", help="note in tidy_clean.txt what was clean")
    parser.add_argument("files", nargs="*", help="only sources whose path ends so")
    arguments = parser.parse_args()
    configuration = (ROOT / ".clang-tidy").read_bytes()
    clean = read_clean()
    entries = {}
    for entry in json.loads((arguments.build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"]).resolve()
        ours = any(path.is_relative_to(ROOT / part) for part in ("src", "apps")) and "testdata" not in path.parts and not path.stem.endswith(("_test", "_fuzz", "_bench"))
        if ours and (not arguments.files or any(str(path).endswith(name) for name in arguments.files)):
            entries.setdefault(str(path.relative_to(ROOT)), entry)
    errors = []
    checked = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        work = {name: pool.submit(check, entry, arguments.build, None if arguments.all else clean.get(name), configuration)
                for name, entry in entries.items()}
        for name, future in work.items():
            digest, ran, error = future.result()
            checked += ran
            if error:
                errors.append(error)
                clean.pop(name, None)
            elif digest:
                clean[name] = digest
    if arguments.write:
        there = {name: digest for name, digest in clean.items() if (ROOT / name).exists()}
        CLEAN.write_text("".join(f"{digest} {name}\n" for name, digest in sorted(there.items())))
    print("\n".join(errors) if errors else f"tidy: {len(entries)} files clean, {checked} of them checked now")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
