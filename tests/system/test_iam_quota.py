# SPDX-License-Identifier: Apache-2.0
"""Quotas on a real node: never exceeded in a burst, everything given back, and no drift when the daemon is killed."""

import contextlib
import tempfile
import threading
import time

import libdsec
import pytest
from libdsec.sync import DSecClient, Sandbox

import support
from support import BASE, MIB

SMALL = dict(container_image=BASE, memory_limit_mb=64, cpu_cores_limit=0.5, disk_limit_mb=64)
NOTHING = {"live": 0, "creating": 0, "cpu_millis": 0, "memory_bytes": 0, "disk_bytes": 0}


def tenant(node, root, project, **limits):
    """A project with limits and the secret of an agent in it."""
    root.iam.put_project(project, limits=limits)
    name = project.replace("/", ".")
    root.iam.put_principal(name, project=project, kind="agent")
    root.iam.grant(name, project, role="agent")
    return root.iam.make_key(name)["secret"]


def create(node, secret, name, **fields):
    """One create that does not wait: (status, headers, body)."""
    body = {"request_id": name, "base": BASE, "limits": {"memory_bytes": 64 * MIB, "cpu_millis": 500, "disk_bytes": 64 * MIB}, **fields}
    return node.curl("POST", "/v1/sandboxes", body, headers={"Authorization": f"Bearer {secret}"}, seconds=120)


@pytest.fixture(scope="module")
def root(node):
    with node.client() as client:
        yield client


def test_burst_of_two_clients_never_exceeds(node, root):
    """Two clients, a limit below a limit: exactly as many as fit, the rest told which limit and when to come again."""
    outer = tenant(node, root, "root/burst", live=12)
    inner = tenant(node, root, "root/burst/in", live=8)
    answers, most, over = {outer: [], inner: []}, [0, 0], threading.Event()
    lock = threading.Lock()

    def client(secret, number):
        for i in range(10):
            status, headers, body = create(node, secret, f"burst-{secret[-6:]}-{number}-{i}")
            with lock:
                answers[secret].append((status, headers, body))

    def watch():
        while not over.is_set():
            for at, project in enumerate(("root/burst", "root/burst/in")):
                most[at] = max(most[at], root.iam.project(project)["used"]["live"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=client, args=(secret, i)) for secret in (outer, inner) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    watcher.join()
    made = {secret: [b["id"] for s, _, b in answers[secret] if s == 201] for secret in answers}
    assert len(made[outer]) + len(made[inner]) == 12 and len(made[inner]) <= 8
    assert most[0] <= 12 and most[1] <= 8
    for status, headers, body in answers[outer] + answers[inner]:
        if status != 201:
            assert (status, body["error"]["reason"]) == (429, "quota.live") and int(headers["Retry-After"]) >= 1
            assert body["error"]["retriable"] and "root/burst" in body["error"]["message"]
    assert root.iam.project("root/burst")["used"] == {
        "live": 12, "creating": 0, "cpu_millis": 6000, "memory_bytes": 12 * 64 * MIB, "disk_bytes": 12 * 64 * MIB}
    for box in made[outer] + made[inner]:
        root.delete(box)
    assert root.iam.project("root/burst")["used"] == NOTHING
    support.wait_until(lambda: root.iam.project("root/burst")["granted"] == NOTHING, 20, "what is idle goes back")
    root.iam.delete_principal("root.burst.in")
    root.iam.delete_project("root/burst/in")


@pytest.mark.parametrize("limit, reason", [
    ({"memory_bytes": 130 * MIB}, "quota.memory_bytes"), ({"cpu_millis": 1000}, "quota.cpu_millis"),
    ({"disk_bytes": 130 * MIB}, "quota.disk_bytes"), ({"live": 2}, "quota.live")])
def test_each_resource_has_its_limit(node, root, limit, reason):
    project = "root/each-" + reason.split(".")[1].replace("_", "-")
    secret = tenant(node, root, project, **limit)
    made = [create(node, secret, f"{project}-{i}".replace("/", ".")) for i in range(3)]
    assert [status for status, _, _ in made] == [201, 201, 429], made
    assert made[2][2]["error"]["reason"] == reason
    for _, _, body in made[:2]:
        root.delete(body["id"])
    assert root.iam.project(project)["used"] == NOTHING


def test_starts_per_second_are_spread(node, root):
    """Nine creates at three in each second of the clock are in three seconds of it, and none fails: they wait for their turn."""
    secret = tenant(node, root, "root/starts", starts_per_second=3)
    with DSecClient(node.url, secret) as client:
        started = time.monotonic()
        boxes = list(client.run_many(libdsec.DSecContainerRunArgs(**SMALL), 9))
        assert all(isinstance(box, Sandbox) for box in boxes), boxes
        assert time.monotonic() - started > 1.0
        for box in boxes:
            box.stop()


def test_create_waits_for_its_own_project_only(node, root):
    """A create that waits for quota holds up nobody of another project, and goes on when its own has room again."""
    secret = tenant(node, root, "root/wait", live=1)
    other = tenant(node, root, "root/wait2")
    first = create(node, secret, "wait-1")[2]
    answer = []
    waiter = threading.Thread(target=lambda: answer.append(create(node, secret, "wait-2", capacity_wait_ms=30_000, timeout_ms=60_000)))
    waiter.start()
    second = create(node, other, "wait-3")
    assert second[0] == 201 and not answer
    root.delete(first["id"])
    waiter.join(30)
    assert answer and answer[0][0] == 201, answer
    root.delete(answer[0][2]["id"]), root.delete(second[2]["id"])
    assert root.iam.project("root/wait")["used"] == NOTHING


def test_creating_bounds_creations_in_flight(node, root):
    """With two at once, twelve still all come, since they wait for each other."""
    secret = tenant(node, root, "root/flight", creating=2)
    with DSecClient(node.url, secret) as client:
        boxes = list(client.run_many(libdsec.DSecContainerRunArgs(**SMALL), 12))
        assert all(isinstance(box, Sandbox) for box in boxes), boxes
        for box in boxes:
            box.stop()
    assert root.iam.project("root/flight")["used"] == NOTHING


def test_failed_create_gives_back(node, root):
    secret = tenant(node, root, "root/failed", live=1)
    for i in range(3):
        status, _, body = create(node, secret, f"failed-{i}", workspace="no:such")
        assert (status, body["error"]["reason"]) == (404, "layer.not_found")
    status, _, body = create(node, secret, "failed-ok")
    assert status == 201
    root.delete(body["id"])
    assert root.iam.project("root/failed")["used"] == NOTHING


KILLS = ["iam.refill.before_commit", "iam.refill.after_commit", "edge.create.after_insert", "edge.create.before_running",
         "edge.create.after_running", "edge.stop.after_record", "edge.stop.after_destroy", "edge.stop.after_end", "iam.trim.before_commit"]


@pytest.mark.parametrize("point", KILLS)
def test_kill_at_any_step_leaves_no_drift(layers, point):
    """kill -9 of the daemon in the middle: afterwards what is used is what lives, in the project and in all above it."""
    folder = tempfile.mkdtemp(prefix="dsec-quota-")
    node = support.Node(folder, layers, "quotakill").start()
    try:
        with node.client() as root:
            secret = tenant(node, root, "root/kill", live=100)
            root.iam.put_project("root", limits={"live": 1000})
            kept = [create(node, secret, f"kept-{i}")[2]["id"] for i in range(3)]
            support.wait_until(lambda: root.iam.project("root")["granted"]["live"] == 3, 20, "what is idle went back")
            node.stop()
            node.start(env={"DSEC_FAULTS": f"{point}=kill*1"})
        with contextlib.suppress(OSError):  # it dies under one of them, or a little later
            for i in range(4):
                box = create(node, secret, f"killed-{i}")[2]["id"]
                if i % 2 == 0:
                    node.curl("DELETE", f"/v1/sandboxes/{box}")
        assert node.process.wait(20) == -9, "it was killed at the point"
        node.process.stdout.close()
        node.start()
        with node.client() as root:
            live = [box.id for box in root.list(project="root/kill")]
            assert set(kept) <= set(live)
            support.wait_until(lambda: len(list(root.list(project="root/kill"))) == root.iam.project("root/kill")["used"]["live"], 20, "settled")
            live = len(list(root.list(project="root/kill")))

            def settled():
                return all(root.iam.project(p)["granted"]["live"] == live for p in ("root", "root/kill"))

            support.wait_until(settled, 20, "the ledgers are what lives")
            for box in root.list(project="root/kill"):
                box.stop()
            assert root.iam.project("root")["used"] == NOTHING
            support.wait_until(lambda: root.iam.project("root")["granted"] == NOTHING, 20, "all is given back")
    finally:
        if node.process.poll() is None:
            node.stop()
        assert node.purge().returncode == 0
        support.remove_tree(folder)
