#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes libdsec/_sync from libdsec/_async: the asynchronous code is the only source. `--check` only compares."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1] / "libdsec"
FILES = ["client.py", "files.py", "fncall.py", "iam.py", "network.py", "process.py", "transport.py"]
REPLACEMENTS = [
    (r"\basync def\b", "def"),
    (r"\basync with\b", "with"),
    (r"\basync for\b", "for"),
    (r"\bawait ", ""),
    (r"\b__aenter__\b", "__enter__"),
    (r"\b__aexit__\b", "__exit__"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\baiter_bytes\b", "iter_bytes"),
    (r"\baiter_stream\b", "iter_stream"),
    (r"\baread\b", "read"),
    (r"\baclose\b", "close"),
    (r"\bhandle_async_request\b", "handle_request"),
    (r"\blibdsec\._async\b", "libdsec._sync"),
]


def convert(text):
    """Returns the synchronous form of a module."""
    for pattern, replacement in REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    first, rest = text.split("\n", 1)
    return f"{first}\n# Written by tools/make_sync.py from libdsec/_async; change that instead.\n{rest}"


def main():
    stale = []
    for name in FILES:
        wanted = convert((ROOT / "_async" / name).read_text(encoding="utf-8"))
        target = ROOT / "_sync" / name
        if not target.exists() or target.read_text(encoding="utf-8") != wanted:
            stale.append(name)
            if "--check" not in sys.argv:
                target.write_text(wanted, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"stale: {', '.join(stale)}; run sdk/python/tools/make_sync.py")


if __name__ == "__main__":
    main()
