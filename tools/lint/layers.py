#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the #include lines under src/ against the dependency table in ARCHITECTURE.md.

The table stands between the lines `<!-- layers -->` and `<!-- /layers -->`, one row a folder:
`| folder | may include |`. A folder may always include itself; a folder without a row fails.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([a-z0-9_]+)/', re.MULTILINE)


def read_table(text):
    """Returns {folder: set of folders it may include}."""
    block = text.split("<!-- layers -->")[1].split("<!-- /layers -->")[0]
    table = {}
    for line in block.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 2 and re.fullmatch(r"`[a-z0-9_]+`", cells[0]):
            table[cells[0].strip("`")] = set(re.findall(r"`([a-z0-9_]+)`", cells[1]))
    return table


def main():
    table = read_table((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    errors = []
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix not in (".h", ".cc") or not path.is_file():
            continue
        folder = path.relative_to(ROOT / "src").parts[0]
        if folder not in table:
            errors.append(f"{path.relative_to(ROOT)}: folder {folder} has no row in ARCHITECTURE.md")
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match or match[1] in ("dsec", "interop"):  # generated protobuf code
                continue
            if match[1] != folder and match[1] not in table[folder]:
                errors.append(f"{path.relative_to(ROOT)}:{number}: {folder} must not include {match[1]}")
    for folder, allowed in table.items():
        for other in allowed:
            if folder in table.get(other, set()):
                errors.append(f"ARCHITECTURE.md: {folder} and {other} include each other")
    print("\n".join(errors) if errors else f"layers: {len(table)} folders, no violation")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
