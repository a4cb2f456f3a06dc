# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: create bursts, idempotency, API contract; TTL, leases, leaks; observability."""

import concurrent.futures
import json
import subprocess
import sys
import time

import pytest

import support
from libdsec import DSecContainerRunArgs, Exited, errors
from support import ROOT, args, sandbox, wait_until


def test_case_073_burst_of_creates(node, client):
    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            boxes = list(pool.map(lambda _: client.run_container(args(memory_limit_mb=64)), range(150)))
            assert all(r.ok for r in pool.map(lambda b: b.exec(["true"]), boxes))
            assert all(r["state"] == "stopped" for r in pool.map(lambda b: b.stop(), boxes))
        assert len({box.id for box in boxes}) == 150
    wait_until(lambda: client.node()["live"] == 0, 30, "nothing is live")


def test_run_many_streams_each_as_it_becomes_ready(client):
    boxes = list(client.run_many(args(memory_limit_mb=64, labels={"batch": "m"}), 20))
    assert len(boxes) == 20 and all(box.run_shell("echo ok").ok for box in boxes)
    done = list(client.delete_by_label({"batch": "m"}))
    assert sorted(r["id"] for r in done) == sorted(b.id for b in boxes)


def test_case_074_same_key_one_sandbox(node, client):
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        boxes = list(pool.map(lambda _: client.run_container(args(), request_id="case74"), range(20)))
    assert len({box.id for box in boxes}) == 1
    with pytest.raises(errors.ConflictError) as caught:
        client.run_container(args(memory_limit_mb=300), request_id="case74")
    assert caught.value.reason == "create.request_id_reused"
    node.kill()
    node.start()
    with node.client() as again:
        assert again.run_container(args(), request_id="case74").id == boxes[0].id
        again.delete(boxes[0].id)
        ended = again.run_container(args(), request_id="case74")
        assert ended.id == boxes[0].id and ended.state == "stopped"


CREATOR = """
import sys
sys.path.insert(0, {sdk!r})
sys.path.insert(0, {tests!r})
from support import args
from libdsec.sync import DSecClient
client = DSecClient({url!r}, {key!r}).open()
print("go", flush=True)
client.run_container(args(labels={{"case": "75"}}), request_id={request!r})
"""


def test_case_075_client_killed_between_request_and_answer(node, client):
    for number in range(8):
        code = CREATOR.format(sdk=str(ROOT / "sdk" / "python"), tests=str(ROOT / "tests"), url=node.url, key=node.key,
                              request=f"case75-{number}")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        try:
            child.wait(number * 0.01)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
        first = client.run_container(args(labels={"case": "75"}), request_id=f"case75-{number}")
        second = client.run_container(args(labels={"case": "75"}), request_id=f"case75-{number}")
        assert first.id == second.id and first.exec(["true"]).ok
    assert len(list(client.list(labels={"case": "75"}))) == 8
    assert len(list(client.delete_by_label({"case": "75"}))) == 8


def test_case_078_delete_works_in_every_state_and_twice(client):
    box = client.run_container(args())
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        results = list(pool.map(lambda _: client.delete(box.id), range(10)))
    assert all(r["state"] == "stopped" for r in results)
    assert client.delete(box.id)["state"] == "stopped"
    with pytest.raises(errors.NotFoundError):
        client.delete("sb-nowhere-01h00000000000000000000000")
    busy = client.run_container(args())
    process = busy.start(["sleep", "600"])
    started = time.monotonic()
    assert busy.stop()["state"] == "stopped" and time.monotonic() - started < 5
    with pytest.raises(errors.SandboxEndedError):
        process.status()


def test_case_078_delete_wins_over_a_create_that_is_under_way(node, client):
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        creates = [pool.submit(client.run_container, args(labels={"case": "78"})) for _ in range(24)]
        for _ in range(40):
            for record in client.list(labels={"case": "78"}, include_ended=False):
                client.delete(record.id)
        for create in creates:
            try:
                create.result()
            except errors.DSecError as error:
                assert error.code in ("GONE", "CANCELLED", "CONFLICT"), error
    list(client.delete_by_label({"case": "78"}))
    wait_until(lambda: not list(client.list(labels={"case": "78"})), 10, "none is left")


BAD_CREATES = [
    ({"ttl_ms": -1}, "ttl_ms"), ({"ttl_ms": 10**18}, "ttl_ms"), ({"ttl_ms": "5"}, "ttl_ms"), ({"ttl_ms": 1.5}, "ttl_ms"),
    ({"limits": {"memory_bytes": 1}}, "limits.memory_bytes"), ({"limits": {"memory_bytes": 10**15}}, "limits.memory_bytes"),
    ({"limits": {"cpu_millis": 0}}, None), ({"limits": {"cpu_millis": 10**9}}, "limits.cpu_millis"),
    ({"limits": {"pids": -5}}, "limits.pids"), ({"limits": {"nope": 1}}, "limits.nope"), ({"unknown": 1}, "unknown"),
    ({"backend": "spaceship"}, "backend"), ({"labels": {"a": 5}}, "labels"), ({"base": 5}, "base"), ({"base": ""}, "base"),
    ({"network": {"mode": "host"}}, "network.mode"), ({"hostname": "a b"}, "hostname"), ({"labels": {"x": "y" * (1 << 20)}}, None),
    ({"toolkits": "a:1"}, "toolkits"), ({"env": {"A=B": "x"}}, "env"), ({"name": "../x"}, "name"),
]


@pytest.mark.parametrize("change,field", BAD_CREATES, ids=[json.dumps(c)[:40] for c, _ in BAD_CREATES])
def test_case_079_values_are_checked_at_the_door(node, client, change, field):
    body = {"request_id": f"bad-{time.monotonic_ns()}", "base": support.BASE, **change}
    status, _, reply = node.curl("POST", "/v1/sandboxes", body)
    if change == {"limits": {"cpu_millis": 0}} and status in (200, 201):  # 0 is "default" as null is
        assert reply["limits"]["cpu_millis"] > 0
        client.delete(reply["id"])
        return
    assert status in (400, 413), reply
    if field:
        assert field in reply["error"]["field"], reply
    assert reply["error"]["message"]


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"request_id":1}', '{"ttl_ms":NaN}', "\xff", '{"a":' * 2000])
def test_case_079_bodies_that_are_not_the_object_we_want(node, text):
    status, _, reply = node.curl("POST", "/v1/sandboxes", text.encode("latin-1"),
                                 headers={"Content-Type": "application/json"})
    assert status == 400 and reply["error"]["reason"].startswith("request."), reply


def test_case_079_null_means_default(node, client):
    body = {"request_id": "nulls", "base": support.BASE, "ttl_ms": None, "limits": None, "workspace": None}
    status, _, reply = node.curl("POST", "/v1/sandboxes", body)
    assert status == 201, reply
    client.delete(reply["id"])


def test_case_080_list_is_complete_paged_and_filtered_first(client):
    boxes = [client.run_container(args(memory_limit_mb=64, labels={"odd": str(i % 2), "case": "80"})) for i in range(14)]
    for box in boxes[:4]:
        box.stop()
    listed = [box.id for box in client.list(labels={"case": "80", "odd": "1"}, page_size=2)]
    assert sorted(listed) == sorted(box.id for i, box in enumerate(boxes) if i % 2 and i >= 4)
    everything = [box.id for box in client.list(labels={"case": "80"}, include_ended=True, page_size=3)]
    assert sorted(everything) == sorted(box.id for box in boxes) and len(set(everything)) == len(everything)
    list(client.delete_by_label({"case": "80"}))


def test_case_081_not_found_is_not_one_thing(node, client):
    with pytest.raises(errors.NotFoundError):
        client.get("sb-other-01h00000000000000000000000")
    stopped = client.run_container(args())
    stopped.stop()
    expired = client.run_container(args(ttl=1))
    idle = client.run_container(args(ttl_running_stop=1))
    wait_until(lambda: expired.refresh()["state"] == "stopped" and idle.refresh()["state"] == "stopped", 15, "both end")
    for box, cause in ((stopped, "user_stop"), (expired, "ttl"), (idle, "idle")):
        with pytest.raises(errors.SandboxEndedError) as caught:
            box.run_shell("true")
        assert caught.value.reason == f"sandbox.ended.{cause}" and caught.value.http_status == 410
        assert caught.value.termination["cause"] == cause


def test_case_082_name_in_use(client):
    for _ in range(25):
        box = client.run_container(args(name="case82"))
        with pytest.raises(errors.ConflictError):
            client.run_container(args(name="case82"))
        box.stop()


def test_case_084_ttl_meets_a_running_command(client):
    box = client.run_container(args(ttl=3, ttl_wait_for_exec=True, ttl_max_extension=30))
    result = box.run_shell("sleep 5; echo reward=1")
    assert result.end == Exited(0) and result.stdout == b"reward=1\n"
    wait_until(lambda: box.refresh()["state"] == "stopped", 10, "it ends after the command")
    hard = client.run_container(args(ttl=3))
    started = time.monotonic()
    end = hard.run_shell("sleep 10; echo reward=1").end
    assert end.__class__.__name__ == "SandboxEnded" and end.cause == "ttl" and time.monotonic() - started < 6


def test_case_086_renewal_survives_restarts(node, client):
    box = client.run_container(args(ttl=4))
    box.renew(ttl=60)
    short = client.run_container(args(ttl=3))
    node.kill()
    support.pause(5)
    node.start()
    with node.client() as again:
        wait_until(lambda: again.get(short.id).state == "stopped", 5, "expired while we were down")
        assert again.get(short.id).info["termination"]["cause"] == "ttl"
        assert again.get(box.id).run_shell("echo alive").stdout == b"alive\n"
        again.delete(box.id)


def test_case_087_only_activity_is_activity(client):
    polled = client.run_container(args(ttl_running_stop=3))
    used = client.run_container(args(ttl_running_stop=3))
    end = time.monotonic() + 6
    while time.monotonic() < end:
        polled.refresh()
        polled_stats_ended = polled.state
        list(client.list())
        used.run_shell("true")
        support.pause(0.3)
    assert polled.refresh()["termination"]["cause"] == "idle", polled_stats_ended
    assert used.refresh()["state"] == "running"
    used.stop()


def test_case_090_soak_without_drift(node, client):
    def cycle(number):
        with sandbox(client, memory_limit_mb=64) as box:
            box.files.write("/tmp/x", b"1" * 1000)
            return box.run_shell(f"cat /tmp/x | wc -c; exit {number % 3}").end == Exited(number % 3)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(cycle, range(60)))
        wait_until(lambda: client.node()["live"] == 0, 20, "none is live")
        fds, threads, rss = node.fds(), node.threads(), node.rss_kib()
        assert all(pool.map(cycle, range(240)))
        wait_until(lambda: client.node()["live"] == 0, 20, "none is live")
    wait_until(lambda: node.fds() <= fds + 16, 20, f"descriptors come back to {fds}")
    assert node.threads() <= threads + 2
    assert node.rss_kib() < rss + 32 * 1024


def test_case_157_every_end_has_one_cause(client):
    ends = {
        "user_stop": client.run_container(args()),
        "ttl": client.run_container(args(ttl=1)),
        "idle": client.run_container(args(ttl_running_stop=1)),
        "entrypoint_exit": client.run_container(args(entrypoint=["sh", "-c", "sleep 0.5; exit 3"])),
    }
    ends["user_stop"].stop()
    for cause, box in ends.items():
        wait_until(lambda: box.refresh()["state"] == "stopped", 15, cause)
        assert box.info["termination"]["cause"] == cause and box.info["termination"]["at_unix_ms"] > 0
        events = list(box.events())
        assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
        assert len([e for e in events if e["type"] == "ended"]) == 1 and events[-1]["type"] == "ended"


def test_case_157_failed_create_has_a_cause(client):
    with pytest.raises(errors.NotFoundError) as caught:
        client.run_container(DSecContainerRunArgs(container_image="no:such"))
    assert caught.value.reason == "layer.not_found" and "no:such" in caught.value.message


def test_case_159_usage_figures_are_true(client):
    with sandbox(client) as box:
        result = box.exec(["python3", "-c", "import time\nt=time.process_time()\nwhile time.process_time()-t<2: pass"])
        assert 1.9 <= result.user_time + result.system_time <= 2.4
        box.exec(["python3", "-c", "x = bytearray(150 << 20)"])
        usage = box.stats()["usage"]
        assert usage["memory_peak_bytes"] >= 150 * support.MIB and usage["cpu_usec"] >= 1_900_000
        box.run_shell("head -c 20000000 /dev/urandom > /blob; sync")
        wait_until(lambda: 19_000_000 <= box.stats()["usage"]["disk_bytes"] <= 24_000_000, 40, "disk use is seen")


def test_case_161_bulk_operations_tell_the_truth(client):
    boxes = [client.run_container(args(memory_limit_mb=64, labels={"case": "161"})) for _ in range(20)]
    boxes[0].stop()
    records = list(client.delete_by_label({"case": "161"}))
    assert sorted(r["id"] for r in records) == sorted(b.id for b in boxes[1:])
    assert all(r["type"] == "deleted" for r in records)
    assert list(client.delete_by_label({"case": "161"})) == []


def test_metrics_and_health(node):
    status, headers, text = node.curl("GET", "/metrics", raw=True)
    assert status == 200 and b"# TYPE" in text and headers["Content-Type"].startswith("text/plain")
    import http.client

    connection = http.client.HTTPConnection(node.url.split("//")[1], timeout=10)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_api_key_is_needed(node, key):
    import http.client

    connection = http.client.HTTPConnection(node.url.split("//")[1], timeout=10)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for path in ("/v1/sandboxes", "/v1/node", "/v1/layers", "/metrics", "/v1/events"):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        assert response.status == 401 and json.loads(response.read())["error"]["reason"].startswith("auth.")
    connection.close()


def test_api_key_file_is_private(node):
    assert (node.state / "api_key").stat().st_mode & 0o777 == 0o600
