#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The same reward through the door for SandboxFusion's clients, as reward code that posts to `run_code` does it: only the URL
is ours. With the key in it, nothing else has to change:

    reward_fusion.py http://key:KEY@127.0.0.1:7878/run_code

Statuses as there: 504 is worth a repeat, SandboxError is no verdict, Failed is one.
"""

import base64
import concurrent.futures
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from reward import EXAMPLES, code_of, same

TRIES = 3


def post(url, body, seconds):
    """One request; user and password of the URL become the Basic scheme, as HTTP libraries do it."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(
        parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(), json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    if parts.password is not None:
        pair = f"{urllib.parse.unquote(parts.username or '')}:{urllib.parse.unquote(parts.password)}"
        request.add_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.load(response)


def run(url, code, language, stdin, seconds=10, memory_mb=512):
    """The reply of run_code, or None when the platform has failed."""
    body = {"code": code, "language": language, "stdin": stdin, "compile_timeout": 30, "run_timeout": seconds,
            "memory_limit_MB": memory_mb, "files": {}, "fetch_files": []}
    for attempt in range(1, TRIES + 1):
        try:
            reply = post(url, body, 30 + seconds + 30)
            return None if reply["status"] == "SandboxError" else reply
        except urllib.error.HTTPError as error:
            if error.code != 504 or attempt == TRIES:
                raise
            time.sleep(attempt)
    return None


def reward(url, sample):
    """The share of tests that pass, or None when the platform failed one of them."""
    code = code_of(sample["completion"], sample["language"])
    passed = 0
    for test in sample["tests"]:
        reply = run(url, code, sample["language"], test["stdin"])
        if reply is None:
            return None
        passed += reply["status"] == "Success" and same(reply["run_result"]["stdout"], test["stdout"])
    return passed / len(sample["tests"])


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for value in pool.map(lambda sample: reward(sys.argv[1], sample), EXAMPLES):
            print(json.dumps({"reward": value}))


if __name__ == "__main__":
    main()
