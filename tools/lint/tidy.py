#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy with the allow-list of .clang-tidy on every source under src/ and apps/; results are cached by the
preprocessed content, so an unchanged file costs nothing."""

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


def digest_of(entry, configuration):
    """Returns a digest over the preprocessed source and the configuration, or None if it does not preprocess."""
    words = shlex.split(entry["command"])
    while words and not pathlib.Path(words[0]).name.startswith("clang"):
        words.pop(0)
    command = [word for word in words if word not in ("-MD", "-c")]
    if "-o" in command:
        place = command.index("-o")
        del command[place:place + 2]
    process = subprocess.run(command + ["-E", "-P"], cwd=entry["directory"], capture_output=True)
    if process.returncode != 0:
        return None
    return hashlib.sha256(configuration + process.stdout).hexdigest()


def check(entry, build, cache, configuration):
    digest = digest_of(entry, configuration)
    if digest and (cache / digest).exists():
        return None
    process = subprocess.run(["clang-tidy-19", "-p", str(build), "--quiet", entry["file"]], capture_output=True, text=True)
    if process.returncode != 0:
        return process.stdout[:4000] or process.stderr[:4000]
    if digest:
        (cache / digest).touch()
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("files", nargs="*", help="only sources whose path ends so")
    arguments = parser.parse_args()
    cache = arguments.build / "tidy-cache"
    cache.mkdir(exist_ok=True)
    configuration = (ROOT / ".clang-tidy").read_bytes()
    entries = {}
    for entry in json.loads((arguments.build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"]).resolve()
        ours = any(path.is_relative_to(ROOT / part) for part in ("src", "apps")) and "testdata" not in path.parts and not path.stem.endswith(("_test", "_fuzz", "_bench"))
        if ours and (not arguments.files or any(str(path).endswith(name) for name in arguments.files)):
            entries.setdefault(path, entry)
    errors = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda e: check(e, arguments.build, cache, configuration), entries.values()):
            if result:
                errors.append(result)
    print("\n".join(errors) if errors else f"tidy: {len(entries)} files clean")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
