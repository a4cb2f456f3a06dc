# SPDX-License-Identifier: Apache-2.0
"""FnCall's arguments, results and Python functions, without a server."""

import base64
import contextlib
import json
import math
import subprocess
import sys

import pytest

from libdsec import DSecFnCallArgs, FnFile, FnGpu, FnLimits, FnVerdict, errors, fncall, function
from libdsec._sync import fncall as sync_fncall


def wire_step(verdict="OK", **fields):
    return {"verdict": verdict, "stdout": {"data": "out", "total": 3}, "stderr": {"data_b64": "/w==", "total": 1},
            "wall_usec": 1500000, "cpu_usec": 500000, "memory_peak_bytes": 7, **fields}


def wire_result(verdict="OK", **fields):
    return {"op_id": "o", "verdict": verdict, "files": [], "missing": [], "queue_usec": 250000, "attempts": 1, "existed": False,
            **fields}


def test_args_say_only_what_was_set():
    wire = DSecFnCallArgs(type="c", code="x", op_id="o").to_wire()
    assert wire == {"op_id": "o", "type": "c", "code": "x"}
    assert DSecFnCallArgs(type="c").to_wire()["op_id"] != DSecFnCallArgs(type="c").to_wire()["op_id"]


def test_args_convert_units_and_bytes():
    wire = DSecFnCallArgs(
        type="c", code=b"\xff", stdin=b"in", args=["a"], files={"a": "text", "b": b"\xfe"}, fetch=["out/"],
        limits=FnLimits(wall=1.5, cpu=0.25, memory_mb=64, disk_mb=0.5, processes=3), compile_limits=FnLimits(wall=9),
        keep_artifacts=True, container_image="b:1", workspace="w:1", toolkits=["t:1"], gpu=FnGpu(2, "1g.10gb", True),
        env={"A": "a", "B": b"\x80"},
    ).to_wire()
    assert base64.b64decode(wire["code_b64"]) == b"\xff" and wire["stdin"] == "in" and wire["args"] == ["a"]
    assert wire["files"] == [{"path": "a", "content": "text"}, {"path": "b", "content_b64": "/g=="}]
    assert wire["limits"] == {"wall_ms": 1500, "cpu_ms": 250, "memory_bytes": 64 << 20, "processes": 3, "disk_bytes": 1 << 19}
    assert wire["compile_limits"] == {"wall_ms": 9000} and wire["fetch"] == ["out/"] and wire["keep_artifacts"] is True
    assert wire["environment"] == {"base": "b:1", "workspace": "w:1", "toolkits": ["t:1"]}
    assert wire["gpu"] == {"count": 2, "kind": "1g.10gb", "shared": True}
    assert wire["env"] == {"A": "a"} and wire["env_b64"] == {"B": "gA=="}


def test_files_may_be_artifacts_with_modes():
    assert FnFile("p", artifact="sha256:0", mode=0o755).to_wire() == {"path": "p", "artifact": "sha256:0", "mode": "0755"}


@pytest.mark.parametrize("field", ["args", "fetch"])
def test_a_string_is_no_list_of_strings(field):
    with pytest.raises(errors.InvalidArgumentError):
        DSecFnCallArgs(type="c", **{field: "abc"}).to_wire()


def test_result_is_typed():
    record = {"path": "f", "content": "x", "mode": "0644"}
    result = fncall.result_from_wire(wire_result(run=wire_step(exit_code=0), files=[record], compile=wire_step(cached=True)))
    assert result.ok and result.verdict is FnVerdict.OK and result.check() is result and result.queue_time == 0.25
    assert (result.stdout, result.stderr, result.text, result.exit_code) == (b"out", b"\xff", "out", 0)
    assert result.run.wall_time == 1.5 and result.run.cpu_time == 0.5 and result.compile.cached and not result.run.cached
    assert result.files["f"] == FnFile("f", b"x", None, 0o644)


def test_check_tells_the_program_from_the_platform():
    failed = fncall.result_from_wire(wire_result("TIME_LIMIT", run=wire_step("TIME_LIMIT", limit="cpu")))
    with pytest.raises(errors.CallError) as caught:
        failed.check()
    assert caught.value.result is failed and not caught.value.infrastructure and failed.run.limit == "cpu"
    broken = fncall.result_from_wire(wire_result("INFRASTRUCTURE", message="m", reason="fn.poison", retriable=True))
    with pytest.raises(errors.InfrastructureError) as caught:
        broken.check()
    assert caught.value.reason == "fn.poison" and caught.value.retriable and broken.infrastructure and broken.stdout == b""


# --- functions: what travels is run by an interpreter of its own ---


def run_here(remote, tmp_path, *args, **kwargs):
    call = remote.call_args(*args, **kwargs)
    for file in call.files:
        (tmp_path / file.path).write_text(file.content)
    done = subprocess.run([sys.executable, "-c", call.code], cwd=tmp_path, capture_output=True, timeout=60)
    files = [{"path": name, "content": (tmp_path / name).read_text(), "mode": "0644"}
             for name in call.fetch if (tmp_path / name).exists()]
    verdict = "OK" if done.returncode == 0 else "WRONG_EXIT"
    return fncall.result_from_wire(wire_result(verdict, run=wire_step(verdict, exit_code=done.returncode), files=files))


@function
def area(radius, *, scale=1):
    """Uses a module of ours by name."""
    return {"area": scale * math.pi * radius**2, "parts": [radius, None, "ü"]}


@function(setup="LIMIT = 3")
def fails(kind):
    """Raises what it is told to."""
    if kind == "value":
        raise ValueError("bad value")
    if kind == "unicode":
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")
    if kind == "own":
        class Own(Exception):
            pass
        raise Own("mine")
    if kind == "odd":
        return {1, 2}
    raise SystemExit(LIMIT)  # noqa: F821


def test_function_returns_what_it_returned(tmp_path):
    assert area(2)["parts"] == [2, None, "ü"]
    assert area.value(run_here(area, tmp_path, 2, scale=2)) == area.local(2, scale=2)
    assert area.__name__ == "area" and area.call_args(1).type == "python"


@pytest.mark.parametrize("kind, expected, name", [
    ("value", ValueError, "ValueError"), ("unicode", errors.FunctionError, "UnicodeDecodeError"),
    ("own", errors.FunctionError, "fails.<locals>.Own"), ("odd", TypeError, "TypeError"),
])
def test_function_raises_what_it_raised(tmp_path, kind, expected, name):
    with pytest.raises(expected) as caught:
        fails.value(run_here(fails, tmp_path, kind))
    assert isinstance(caught.value, errors.FunctionError) and caught.value.exception_type.endswith(name)
    assert "Traceback" in caught.value.remote_traceback


def test_function_that_left_is_a_call_error(tmp_path):
    with pytest.raises(errors.CallError) as caught:
        fails.value(run_here(fails, tmp_path, "exit"))
    assert caught.value.result.exit_code == 3


def test_function_result_of_its_own_making_is_no_result():
    for text in ("", "[]", "{", '{"error": 5}', '{"other": 1}'):
        result = fncall.result_from_wire(wire_result(
            run=wire_step(exit_code=0), files=[{"path": ".dsec-result.json", "content": text, "mode": "0644"}]))
        with pytest.raises(errors.CallError):
            area.value(result)


def test_function_that_cannot_travel_is_refused():
    outer = 5

    def closure():
        return outer

    def uses_global():
        return wire_step()

    async def coroutine():
        return 1

    for bad in (closure, uses_global, coroutine, lambda: 1, print):
        with pytest.raises(errors.InvalidArgumentError):
            function(bad)
    with pytest.raises(errors.InvalidArgumentError):
        area.call_args(object())


# --- call_many over a transport that breaks as told ---


class Transport:
    """Answers each batch by the next script: a list of records, errors to raise among them."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.bodies = []

    @contextlib.contextmanager
    def stream(self, method, path, *, body):
        assert (method, path) == ("POST", "/v1/fn/calls")
        self.bodies.append(json.loads(json.dumps(body)))
        yield self.scripts.pop(0)

    def records(self, script):
        for record in script:
            if isinstance(record, Exception):
                raise record
            yield record


CUT = errors.UnavailableError("cut", reason="client.connection", code="UNAVAILABLE", retriable=True)
FULL = {"code": "RESOURCE_EXHAUSTED", "reason": "fn.queue_full", "message": "full", "retriable": True}
REFUSED = {"code": "NOT_FOUND", "reason": "fn.type_not_found", "message": "no such type", "retriable": False}


def good(index):
    return {"type": "result", "index": index, "result": wire_result(run=wire_step(exit_code=0))}


def run_many(transport, count, batch=3):
    calls = (DSecFnCallArgs(type="c", op_id=f"o{i}") for i in range(count))
    return list(sync_fncall.call_many(transport, calls, 2, batch, 30.0))


def test_many_go_on_after_a_cut_with_what_is_open():
    transport = Transport([good(2), CUT], [good(0), good(1), good(2), {"type": "done"}], [good(0), {"type": "done"}])
    assert sorted(index for index, _ in run_many(transport, 5)) == [0, 1, 2, 3, 4]
    sent = [[call["op_id"] for call in body["calls"]] for body in transport.bodies]
    assert sent == [["o0", "o1", "o2"], ["o0", "o1", "o3"], ["o4"]]
    assert transport.bodies[0]["concurrency"] == 2


def test_many_try_what_is_retriable_again_and_yield_what_is_not():
    transport = Transport(
        [{"type": "error", "index": 0, "error": FULL}, {"type": "error", "index": 1, "error": REFUSED}, {"type": "done"}],
        [good(0), {"type": "done"}],
    )
    outcomes = dict(run_many(transport, 2))
    assert outcomes[0].ok and isinstance(outcomes[1], errors.NotFoundError)


def test_many_raise_what_will_not_mend():
    with pytest.raises(errors.InvalidArgumentError):
        run_many(Transport([errors.InvalidArgumentError("no", code="INVALID_ARGUMENT")]), 1)
    stop = {"type": "error", "error": dict(FULL, reason="apiserver.stopping", code="UNAVAILABLE", retriable=False)}
    with pytest.raises(errors.UnavailableError):
        run_many(Transport([good(0), stop]), 2)


def test_many_of_nothing_send_nothing():
    assert run_many(Transport(), 0) == []
