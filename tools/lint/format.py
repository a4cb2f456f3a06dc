#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every tracked C++ file is as clang-format writes it, and that every tracked source file bears the licence
line within its first three lines."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
LICENCED = {".h", ".cc", ".c", ".py", ".sh", ".proto", ".cmake", ".txt", ".yaml", ".toml"}
UNLICENCED_PARTS = ("testdata/", "corpus/")


def main():
    tracked = subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).splitlines()
    errors = []
    for name in tracked:
        path = ROOT / name
        if path.suffix not in LICENCED or any(part in name for part in UNLICENCED_PARTS) or not path.is_file():
            continue
        if path.suffix == ".txt" and path.name != "CMakeLists.txt":
            continue
        head = path.read_text(encoding="utf-8", errors="replace").splitlines()[:3]
        if not any("SPDX-License-Identifier: Apache-2.0" in line for line in head):
            errors.append(f"{name}: no licence line")
    sources = [name for name in tracked if name.endswith((".h", ".cc")) and (ROOT / name).is_file()]
    for start in range(0, len(sources), 40):
        process = subprocess.run(["clang-format-19", "--dry-run", "-Werror", *sources[start:start + 40]],
                                 cwd=ROOT, capture_output=True, text=True)
        if process.returncode != 0:
            names = sorted({line.split(":")[0] for line in process.stderr.splitlines() if "error:" in line})
            errors += [f"{name}: not formatted (make format)" for name in names]
    print("\n".join(errors) if errors else f"format: {len(tracked)} tracked files")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
