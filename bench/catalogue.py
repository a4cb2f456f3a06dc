# SPDX-License-Identifier: Apache-2.0
"""How long a page of 100 layers takes in a catalogue of 200,000, from the first to the last."""

import hashlib
import sqlite3
import statistics
import time

LAYERS = 200_000
PAGE = 100


def fill(path, count=LAYERS):
    """Adds `count` layers to a catalogue: nine in ten workspaces, a name and two labels each."""
    config = ""
    layers, names, labels = [], [], []
    for n in range(count):
        layer = "sha256:" + hashlib.sha256(str(n).encode()).hexdigest()
        kind = "base" if n % 20 == 0 else "toolkit" if n % 20 == 1 else "workspace"
        layers.append((layer, kind, 4096, 1 << 20, 100, 1 << 20, 1_700_000_000_000 + n, "bench", config))
        names.append((f"project{n % 1000}/task{n}", "1", layer))
        labels += [(layer, "project", str(n % 1000)), (layer, "split", "train" if n % 10 else "test")]
    with sqlite3.connect(path) as database:
        (config,) = database.execute("SELECT config FROM layers LIMIT 1").fetchone()
        database.executemany("INSERT INTO layers VALUES(?,?,?,?,?,?,?,?,?)", [row[:8] + (config,) for row in layers])
        database.executemany("INSERT INTO names VALUES(?,?,?)", names)
        database.executemany("INSERT INTO labels VALUES(?,?,?)", labels)
    database.close()
    return sorted(row[0] for row in layers)


def page_ms(node, runs=20, **query):
    """Median milliseconds of one page over HTTP."""
    path = "/v1/layers?" + "&".join(f"{key}={value}" for key, value in query.items())
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        status, _, body = node.curl("GET", path)
        times.append((time.perf_counter() - started) * 1e3)
        assert status == 200 and len(body["layers"]) <= PAGE, body
    return statistics.median(times)


def bench_catalogue(figures, node):
    """Fills the catalogue of a node that has at least one layer, and asks it."""
    ids = fill(node.layers / "catalog.db")
    first = page_ms(node, page_size=PAGE)
    last = page_ms(node, page_size=PAGE, page_token=ids[-PAGE - 1])
    figures.add(
        "catalogue_page", last, "ms", None, None, first_ms=first, last_ms=last, layers=len(ids),
        kind_ms=page_ms(node, page_size=PAGE, kind="toolkit", page_token=ids[len(ids) // 2]),
        prefix_ms=page_ms(node, page_size=PAGE, prefix="project7/"),
        label_ms=page_ms(node, page_size=PAGE, label="split=test", page_token=ids[len(ids) // 2]),
        floor_ms=page_ms(node, page_size=1))
