#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""`iam_check`: milliseconds that IAM takes on the way of a create: the key, the rights, the quotas of every project of the path.

Measured on a real node with `--projects` projects, `--keys` keys and limits at every level of a path of depth five, by the node's own figures:
the phase `quota` of each create, and the histogram of key and rights. Beside it the whole create, and the same without limits.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "sdk" / "python")]

import support  # noqa: E402
from libdsec import DSecContainerRunArgs  # noqa: E402
from libdsec.sync import DSecClient  # noqa: E402

ARGS = dict(container_image=support.BASE, memory_limit_mb=64, cpu_cores_limit=0.5, disk_limit_mb=64)


def percentile(values, share):
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def checks(node):
    """(count, seconds) of the histogram of key and rights so far."""
    _, _, text = node.curl("GET", "/metrics", raw=True)
    found = {}
    for line in text.decode("utf-8").splitlines():
        name, _, value = line.rpartition(" ")
        if name in ("dsec_iam_check_seconds_sum", "dsec_iam_check_seconds_count"):
            found[name.rsplit("_", 1)[1]] = float(value)
    return found.get("count", 0), found.get("sum", 0.0)


def creates(node, secret, count, width):
    """Milliseconds of the phases quota and of the whole of `count` creates, `width` at once."""
    quota, whole, lock = [], [], threading.Lock()
    numbers = iter(range(count))

    def work():
        with DSecClient(node.url, secret) as client:
            while True:
                with lock:
                    if next(numbers, None) is None:
                        return
                box = client.run_container(DSecContainerRunArgs(**ARGS))
                phases = {p["phase"]: p["micros"] / 1000 for p in box.info["phases"]}
                box.stop()
                with lock:
                    quota.append(phases["quota"])
                    whole.append(sum(phases.values()))

    threads = [threading.Thread(target=work) for _ in range(width)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return quota, whole


def prepare(root, projects, keys):
    """A world of some size; the secrets of one agent with limits above it and of one without."""
    path = "root"
    for level in range(5):
        path += f"/l{level}"
        root.iam.put_project(path, limits={"live": 3000, "creating": 1000, "memory_bytes": 1 << 40, "cpu_millis": 1 << 30,
                                           "disk_bytes": 1 << 42, "starts_per_second": 5000})
    for i in range(projects):
        root.iam.put_project(f"root/p{i}")
    root.iam.put_project("root/free")
    secrets = []
    for name, project in (("limited", path), ("free", "root/free")):
        root.iam.put_principal(name, project=project, kind="agent")
        root.iam.grant(name, project, role="agent")
        secrets.append(root.iam.make_key(name)["secret"])
    for i in range(0, keys, 50):
        root.iam.put_principal(f"user{i}", project="root/p0")
        root.iam.grant(f"user{i}", "root/p0", role="viewer")
        for _ in range(min(50, keys - i)):
            root.iam.make_key(f"user{i}")
    return secrets


def run(count, width, projects, keys):
    """The figure as a dict of bench/run.py."""
    layers = support.build_layers(support.BUILD / "test-layers")
    folder = tempfile.mkdtemp(prefix="dsec-bench-")
    node = support.Node(folder, layers, "benchiam").start()
    try:
        with node.client() as root:
            limited, free = prepare(root, projects, keys)
        creates(node, limited, 20, width)
        before = checks(node)
        quota, whole = creates(node, limited, count, width)
        after = checks(node)
        free_quota, free_whole = creates(node, free, count, width)
        rights = (after[1] - before[1]) / max(1, after[0] - before[0]) * 1e3
        value = statistics.median(quota) + rights
        return {
            "name": "iam_check", "value": round(value, 4), "unit": "ms", "baseline": round(statistics.median(whole), 4),
            "ratio": round(value / statistics.median(whole), 4),
            "detail": {
                "of": "key, rights and quotas of six projects; the baseline is the whole create", "creates": count, "at_once": width,
                "projects": projects, "keys": keys, "key_and_rights_mean_ms": round(rights, 4),
                "quota_p50_ms": round(statistics.median(quota), 4), "quota_p99_ms": round(percentile(quota, 0.99), 4),
                "without_limits_p50_ms": round(statistics.median(free_quota), 4),
                "create_without_limits_p50_ms": round(statistics.median(free_whole), 4)},
        }
    finally:
        node.stop()
        node.purge()
        support.remove_tree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--creates", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--projects", type=int, default=200)
    parser.add_argument("--keys", type=int, default=1000)
    parser.add_argument("--append", help="file of figures that the line is added to")
    flags = parser.parse_args()
    line = json.dumps(run(flags.creates, flags.at_once, flags.projects, flags.keys))
    print(line)
    if flags.append:
        with open(flags.append, "a", encoding="ascii") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
