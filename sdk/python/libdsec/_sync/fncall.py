# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""FnCall: one call, many calls, functions bound to a client."""

from __future__ import annotations

import json
import time
import typing

from libdsec import _wire, errors, fncall
from libdsec._sync import _flavor
from libdsec._sync.transport import Transport

# Of one request to /v1/fn/calls; the server takes 4096 calls and 64 MiB.
_MAX_BATCH = 1024
_MAX_BATCH_BYTES = 32 << 20

Outcome = typing.Union[fncall.FnResult, errors.DSecError]


def call(transport: Transport, args: fncall.DSecFnCallArgs, timeout: float) -> fncall.FnResult:
    """Runs one call. A cut connection or a full queue is tried again under the same op_id until the time is over."""
    until = time.monotonic() + timeout
    response = transport.call("POST", "/v1/fn/call", body=args.to_wire(), timeout=timeout, retry_until=until)
    return fncall.result_from_wire(response.json())


def _size(wire: dict) -> int:
    return len(json.dumps(wire, ensure_ascii=False))


class _Pending:
    """The calls that were taken from the caller and have no outcome yet."""

    def __init__(self, calls: typing.Iterable[fncall.DSecFnCallArgs]):
        self._source = enumerate(calls)
        self._open: typing.Dict[int, dict] = {}
        self._next: typing.Optional[typing.Tuple[int, dict, int]] = None

    def batch(self, count: int) -> typing.List[typing.Tuple[int, dict]]:
        """The open calls and as many more as there is room for; empty at the end."""
        size = sum(map(_size, self._open.values()))
        while len(self._open) < count:
            if self._next is None:
                taken = next(self._source, None)
                if taken is None:
                    break
                wire = taken[1].to_wire()
                self._next = (taken[0], wire, _size(wire))
            index, wire, length = self._next
            if self._open and size + length > _MAX_BATCH_BYTES:
                break
            self._open[index] = wire
            size += length
            self._next = None
        return list(self._open.items())

    def done(self, index: int) -> None:
        del self._open[index]


def call_many(transport: Transport, calls: typing.Iterable[fncall.DSecFnCallArgs], concurrency: int, batch: int,
                    timeout: float) -> typing.Iterator[typing.Tuple[int, Outcome]]:
    """Runs calls batch by batch. When a stream is cut, its calls without a result go into the next batch; their op_ids make
    sure that none runs twice."""
    pending = _Pending(calls)
    idle = 0  # requests in a row that brought no outcome
    until = time.monotonic() + timeout
    while True:
        items = pending.batch(batch)
        if not items:
            return
        body = {"calls": [wire for _, wire in items], "concurrency": concurrency}
        idle += 1
        fault: typing.Optional[errors.DSecError] = None
        try:
            with transport.stream("POST", "/v1/fn/calls", body=body) as response:
                for record in transport.records(response):
                    if record["type"] == "result":
                        outcome: Outcome = fncall.result_from_wire(record["result"])
                    elif record["type"] == "error":
                        outcome = errors.from_body(record["error"], 0)
                        if outcome.retriable or "index" not in record:
                            fault = outcome  # its calls are still open
                            continue
                    else:
                        continue
                    index = items[record["index"]][0]
                    pending.done(index)
                    idle = 0
                    until = time.monotonic() + timeout
                    yield index, outcome
        except errors.DSecError as error:
            fault = error
        if fault is not None:
            pause = fault.retry_after or min(0.05 * 2**idle, 2.0)
            if not fault.retriable or time.monotonic() + pause >= until:
                raise fault
            _flavor.sleep(pause)


class Function(fncall.RemoteFunction):
    """A Python function that runs in the sandbox when it is called."""

    def __init__(self, client: typing.Any, function: typing.Callable, timeout: float, **options: typing.Any):
        super().__init__(function, **options)
        self._client = client
        self._timeout = timeout

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Runs it and returns what it returns, or raises as ``value`` does."""
        return self.value(self._client.call(self.call_args(*args, **kwargs), timeout=self._timeout))

    def map(self, arguments: typing.Iterable[typing.Sequence[typing.Any]], *, concurrency: int = 256
                  ) -> typing.Iterator[typing.Tuple[int, typing.Any]]:
        """Runs it once for each sequence of arguments; yields (index, value) as each ends, with what it raised in place of the
        value."""
        calls = (self.call_args(*item) for item in arguments)
        for index, outcome in self._client.call_many(calls, concurrency=concurrency, timeout=self._timeout):
            try:
                value = self.value(outcome) if isinstance(outcome, fncall.FnResult) else outcome
            except errors.DSecError as error:
                value = error
            yield index, value


def result(transport: Transport, op_id: str, wait: float) -> typing.Optional[fncall.FnResult]:
    """The kept result of a call, or None when it still runs after ``wait`` seconds."""
    path = f"/v1/fn/calls/{_wire.segment(op_id)}" + _wire.query(wait_ms=round(wait * 1000))
    response = transport.call("GET", path, timeout=wait + 60.0)
    return None if response.status_code == 202 else fncall.result_from_wire(response.json())
