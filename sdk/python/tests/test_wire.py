# SPDX-License-Identifier: Apache-2.0
"""Conversion to and from the wire, without a server."""

import base64

import pytest

from libdsec import _wire, errors, types


def test_args_leave_defaults_to_the_node():
    body = types.DSecContainerRunArgs(container_image="b:1").to_wire()
    assert body == {"backend": "container", "base": "b:1", "network": {"mode": "none"}}


def test_args_convert_units():
    body = types.DSecContainerRunArgs(
        container_image="b:1", memory_limit_mb=1.5, cpu_cores_limit=0.5, ttl=2.5, ttl_running_stop=300
    ).to_wire()
    assert body["limits"] == {"memory_bytes": 1572864, "cpu_millis": 500}
    assert body["ttl_ms"] == 2500 and body["idle_ms"] == 300000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e18, "5", True])
def test_args_refuse_what_is_not_a_number(value):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        types.DSecContainerRunArgs(container_image="b:1", ttl=value).to_wire()
    assert caught.value.field == "ttl"


def test_network_rules_that_allow_are_refused_not_ignored():
    with pytest.raises(errors.UnsupportedError):
        types.DSecContainerRunArgs(container_image="b:1", network_rules={"pypi": True}).to_wire()
    types.DSecContainerRunArgs(container_image="b:1", network_rules={"pypi": False}).to_wire()


def test_exec_body_carries_bytes_that_are_not_text():
    body = _wire.exec_body(op_id="o", argv=["printf", b"\xff"], env={"A": b"\xfe", "B": "x"}, cwd=b"/\xe2")
    assert base64.b64decode(body["argv_b64"][1]) == b"\xff" and "argv" not in body
    assert body["env"] == {"B": "x"} and base64.b64decode(body["env_b64"]["A"]) == b"\xfe"
    assert base64.b64decode(body["cwd_b64"]) == b"/\xe2"


def test_exec_body_keeps_surrogate_escapes_exact():
    body = _wire.exec_body(op_id="o", script="echo \udcff")
    assert base64.b64decode(body["script_b64"]) == b"echo \xff"


def test_exec_argv_must_not_be_a_string():
    with pytest.raises(errors.InvalidArgumentError):
        _wire.exec_body(op_id="o", argv="echo hi")


def test_query_is_exact_for_odd_names():
    assert _wire.query(path=b"/a b/\xff&c=\n%") == "?path=/a%20b/%FF%26c=%0A%25"
    assert _wire.query(a=None, b=True, label=["k=v", "x=y"]) == "?b=true&label=k=v&label=x=y"


def collected(*records):
    collector = _wire.OutputCollector("op")
    for record in records:
        collector.feed(record)
    return collector


def chunk(stream, offset, data):
    return {"type": stream, "offset": offset, "data_b64": base64.b64encode(data).decode()}


@pytest.mark.parametrize(
    "wire,end",
    [
        ({"kind": "exited", "exit_code": 137}, types.Exited(137)),
        ({"kind": "signaled", "signal": 9}, types.Signaled(9)),
        ({"kind": "timeout", "limit": 2000}, types.Timeout(2000)),
        ({"kind": "oom_killed", "limit": 5, "oom_victim": "x"}, types.OomKilled(5, "x")),
        ({"kind": "spawn_error", "step": "exec", "errno": 2, "errno_name": "ENOENT"}, types.SpawnError("exec", 2, "ENOENT")),
        ({"kind": "killed", "killed_by": "cancel"}, types.Killed("cancel")),
        ({"kind": "sandbox_ended", "killed_by": "ttl"}, types.SandboxEnded("ttl")),
    ],
)
def test_end_is_typed(wire, end):
    result = collected({"type": "exit", "result": wire}).result()
    assert result.end == end
    assert result.ok is (end == types.Exited(0))


def test_unknown_end_is_an_infrastructure_error():
    with pytest.raises(errors.InfrastructureError):
        collected({"type": "exit", "result": {"kind": "odd"}}).result()


def test_collector_counts_bytes_and_truncation():
    collector = collected(
        {"type": "started", "op_id": "op", "pid": 7},
        chunk("stdout", 0, b"ab"),
        dict(chunk("stdout", 10, b"yz"), skipped=8),
        {"type": "exit", "result": {"kind": "exited", "exit_code": 0}, "stdout": {"total": 12, "dropped": 8}},
    )
    result = collector.result()
    assert collector.offsets["stdout"] == 12 and collector.pid == 7
    assert result.stdout == b"abyz" and result.stdout_total == 12 and result.truncated


@pytest.mark.parametrize(
    "code,kind",
    [
        ("NOT_FOUND", errors.NotFoundError),
        ("GONE", errors.SandboxEndedError),
        ("RESOURCE_EXHAUSTED", errors.NoCapacityError),
        ("UNAVAILABLE", errors.UnavailableError),
        ("FAILED_PRECONDITION", errors.UnsupportedError),
    ],
)
def test_error_class_follows_code(code, kind):
    error = errors.from_body({"code": code, "reason": "x.y", "message": "m", "field": "f"}, 400)
    assert type(error) is kind and error.reason == "x.y" and error.field == "f"


def test_ended_sandbox_tells_whose_fault():
    body = {"code": "GONE", "details": {"termination": {"cause": "agent_died", "fault": "infrastructure"}}}
    assert errors.from_body(body, 410).infrastructure
    body["details"]["termination"]["fault"] = "workload"
    assert not errors.from_body(body, 410).infrastructure


@pytest.mark.parametrize("pieces", [[b"0123456789"], [b"01234", b"56789"], [b"0", b"123456789"]])
def test_kept_bytes_are_exact_up_to_the_cap(pieces):
    for cap, expected in ((None, b"0123456789"), (10, b"0123456789"), (9, b"012356789"[:4] + b"56789"), (4, b"0189")):
        kept = _wire.KeptBytes(cap)
        for piece in pieces:
            kept.add(piece)
        assert kept.value() == expected, (cap, pieces)


def test_kept_bytes_of_a_flood_are_bounded():
    kept = _wire.KeptBytes(1000)
    for _ in range(10000):
        kept.add(b"x" * 1000)
    assert len(kept.value()) == 1000 and len(kept._tail) < 100000
