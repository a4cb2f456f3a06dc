#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that SPECIFICATION.md and the tests agree on the acceptance cases.

A row of the section "Acceptance cases" is `| number | title | tests |`, and its tests are those that bear the number:
`test_case_NNN_...` in Python, `Suite.CaseNNN_...` in C++ (GoogleTest). The cell says "`a`, `b` in FILE; `c` in FILE",
"not yet: REASON", or both. A row without tests needs the reason; a test without a row, or a row that leaves out one of its
tests or names one that is not there, fails. So does any other test that the document names in backticks and nobody
wrote. `--write` brings the tests of all rows up to date and keeps titles and reasons.
"""

import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPECIFICATION = ROOT / "SPECIFICATION.md"
SECTION = "## Acceptance cases"
ROW = re.compile(r"\| (\d+) \| ([^|]+?) \| (.*?) ?\|")
REASON = re.compile(r"(?:^|; )(not yet: \S.*)$")
PYTHON_TEST = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
CPP_TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)
CASE = re.compile(r"(?:^test_case_|\.Case)(\d{3})_")
NAMED = re.compile(r"`((?:test_\w+|[A-Z]\w*\.[A-Z]\w*_\w+)(?:\.py|\.cc)?)`")


def read_tests():
    """Returns (name, file) of every Python and C++ test, sorted by file, files relative to the root."""
    tests = set()
    for folder in ("tests", "sdk/python/tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in PYTHON_TEST.findall(path.read_text(encoding="utf-8")):
                tests.add((name, str(path.relative_to(ROOT))))
    for path in sorted((ROOT / "src").rglob("*_test.cc")):
        for suite, name in CPP_TEST.findall(path.read_text(encoding="utf-8")):
            tests.add((f"{suite}.{name}", str(path.relative_to(ROOT))))
    return sorted(tests, key=lambda test: (test[1], test[0]))


def by_case(tests):
    """Returns {case number: {file: [names]}}, in the order in which a row lists them."""
    cases = {}
    for name, file in tests:
        if match := CASE.search(name):
            cases.setdefault(int(match[1]), {}).setdefault(file, []).append(name)
    return cases


def cell(files, reason):
    """The third cell of a row."""
    parts = [", ".join(f"`{name}`" for name in names) + f" in {file}" for file, names in files.items()]
    return "; ".join(parts + ([reason] if reason else []))


def difference(row, wanted):
    """What is wrong with the third cell of a row, in words."""
    listed, there = (set(re.findall(r"`([^`]+)`", text)) for text in (row, wanted))
    found = [f"{name} is not in the row" for name in sorted(there - listed)]
    found += [f"the row names {name}, which is no test of this case" for name in sorted(listed - there)]
    return "; ".join(found) or f"the row should say: {wanted}"


def check(text, tests):
    """Returns (text with the rows brought up to date, errors that --write repairs, errors that it does not)."""
    cases = by_case(tests)
    head, _, section = text.partition(SECTION + "\n")
    stale, errors, lines, rows = [], [], [], set()
    for line in section.split("\n"):
        match = ROW.fullmatch(line)
        if match is None and re.match(r"\| *\d", line):
            errors.append(f"not a row: {line}")
        if match is None:
            lines.append(line)
            continue
        number = int(match[1])
        if number in rows:
            errors.append(f"case {number}: two rows")
        rows.add(number)
        reason = REASON.search(match[3])
        wanted = cell(cases.get(number, {}), reason[1] if reason else "")
        if not wanted:
            errors.append(f"case {number}: neither a test nor a reason (not yet: ...)")
        elif wanted != match[3]:
            stale.append(f"case {number}: {difference(match[3], wanted)}")
        lines.append(f"| {number} | {match[2]} | {wanted} |" if wanted else line)
    errors += [f"case {number}: no row for {cell(files, '')}" for number, files in cases.items() if number not in rows]
    written = head + SECTION + "\n" + "\n".join(lines)
    known = {name for name, _ in tests} | {pathlib.Path(file).name for _, file in tests}
    errors += [f"{name}: no such test" for name in NAMED.findall(written) if name not in known]
    return written, stale, errors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring the tests of all rows up to date")
    arguments = parser.parse_args()
    tests = read_tests()
    written, stale, errors = check(SPECIFICATION.read_text(encoding="utf-8"), tests)
    if arguments.write:
        SPECIFICATION.write_text(written, encoding="utf-8")
        stale = []
    if stale:
        errors.append("tools/lint/cases.py --write brings the rows up to date")
    errors = stale + errors
    print("\n".join(errors) if errors else f"cases: {len(by_case(tests))} with tests, all in their rows")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
