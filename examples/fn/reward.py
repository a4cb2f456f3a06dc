#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A reward function over FnCall: the share of tests that a completion's code passes.

    reward.py [COMPLETIONS.json]

COMPLETIONS.json is a list of ``{"language": "python", "completion": "...", "tests": [{"stdin": "...", "stdout": "..."}]}``;
without it a few of its own are scored. One stream carries all tests of all completions. What matters for training:

- a fault of the platform is no zero: the completion has no reward (None) and is to be scored again;
- a verdict other than OK is a failed test, and its kind is kept, so that a time limit can be told from a wrong answer;
- the same program is compiled once, however many tests it has.
"""

import asyncio
import collections
import json
import re
import sys

from libdsec import DSecClient, DSecFnCallArgs, FnLimits, FnResult

LIMITS = FnLimits(wall=10, cpu=5, memory_mb=512)
FENCE = re.compile(r"```(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)

EXAMPLES = [
    {"language": "python", "completion": "```python\nprint(sum(map(int, input().split())))\n```",
     "tests": [{"stdin": "1 2", "stdout": "3"}, {"stdin": "4 5 6", "stdout": "15"}]},
    {"language": "cpp", "completion": "```cpp\n#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b; }\n```",
     "tests": [{"stdin": "1 2", "stdout": "3"}, {"stdin": "4 5 6", "stdout": "15"}]},
    {"language": "python", "completion": "```python\nwhile True: pass\n```", "tests": [{"stdin": "", "stdout": "1"}]},
]


def code_of(completion, language):
    """The first fenced block that names the language, else the first one, else everything."""
    blocks = FENCE.findall(completion)
    named = [code for label, code in blocks if label == language] or [code for _, code in blocks]
    return named[0] if named else completion


def same(written, expected):
    """Equal but for white space at the ends of lines and empty lines at the end."""
    return [line.rstrip() for line in written.rstrip().splitlines()] == [line.rstrip() for line in expected.rstrip().splitlines()]


async def rewards(client, samples, concurrency=256):
    """Returns one (reward, counts of outcomes) a sample; the reward is None when the platform failed one of its tests."""
    tests = [(i, test) for i, sample in enumerate(samples) for test in sample["tests"]]
    calls = (
        DSecFnCallArgs(
            type=samples[i]["language"], code=code_of(samples[i]["completion"], samples[i]["language"]), stdin=test["stdin"], limits=LIMITS
        )
        for i, test in tests
    )
    outcomes = [collections.Counter() for _ in samples]
    async for index, result in client.call_many(calls, concurrency=concurrency):
        sample, test = tests[index]
        if not isinstance(result, FnResult) or result.infrastructure:
            outcome = "INFRASTRUCTURE"
        elif result.ok and not same(result.text, test["stdout"]):
            outcome = "WRONG_ANSWER"
        else:
            outcome = str(result.verdict)
        outcomes[sample][outcome] += 1
    return [
        (None if counts["INFRASTRUCTURE"] else counts["OK"] / max(1, sum(counts.values())), dict(counts)) for counts in outcomes
    ]


async def main():
    samples = EXAMPLES
    if len(sys.argv) > 1:
        with open(sys.argv[1], encoding="utf-8") as file:
            samples = json.load(file)
    async with DSecClient() as client:
        for reward, counts in await rewards(client, samples):
            print(json.dumps({"reward": reward, "outcomes": counts}))


if __name__ == "__main__":
    asyncio.run(main())
