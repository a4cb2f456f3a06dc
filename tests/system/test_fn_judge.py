# SPDX-License-Identifier: Apache-2.0
"""Every program of the judge suite ends as it must, one at a time and 64 at once."""

import sys

import pytest

import support

sys.path.insert(0, str(support.ROOT / "tests" / "judge"))

import judge  # noqa: E402

pytestmark = pytest.mark.usefixtures("languages")


def run(client, rows, concurrency):
    faults = {}
    seen = set()
    for index, result in client.call_many((judge.call_of(row) for row in rows), concurrency=concurrency):
        assert index not in seen, f"{rows[index]['name']} came twice"
        seen.add(index)
        found = judge.faults_of(rows[index], result)
        if found:
            faults[rows[index]["name"]] = found
    assert len(seen) == len(rows)
    assert not faults, "\n".join(f"{name}: {found}" for name, found in sorted(faults.items()))


def test_suite_is_whole():
    names = [row["name"] for row in judge.ROWS]
    assert len(names) == len(set(names)) >= 200
    used = {row["file"] for row in judge.ROWS}
    assert used == {path.name for path in (judge.FOLDER / "testdata").iterdir()}
    assert {row["type"] for row in judge.ROWS} >= {"c", "cpp", "python", "go", "java", "javascript", "bash"}


@pytest.mark.timeout(900)
def test_verdicts_one_at_a_time(client):
    run(client, judge.ROWS, 1)


@pytest.mark.timeout(900)
def test_verdicts_64_at_once(client):
    run(client, judge.ROWS, 64)
