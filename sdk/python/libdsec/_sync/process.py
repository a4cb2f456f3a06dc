# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""One command in a sandbox: run it, follow it, talk to it."""

from __future__ import annotations

import codecs
import signal as _signal
import typing

from libdsec import _wire, errors, types
from libdsec._sync import _flavor
from libdsec._sync.transport import Transport

_RECONNECTS = 5


class Process:
    """A command that was started. Get one from ``Sandbox.start``, ``Sandbox.pty`` or ``Sandbox.attach``.

    Not for concurrent readers: one ``stream()`` or ``wait()`` at a time.
    """

    def __init__(self, transport: Transport, sandbox_id: str, op_id: str, pid: int = 0, cap: typing.Optional[int] = None):
        self._transport = transport
        self._base = f"/v1/sandboxes/{_wire.segment(sandbox_id)}/exec/{_wire.segment(op_id)}"
        self._collector = _wire.OutputCollector(op_id, cap)
        self._collector.pid = pid
        self._stdin_offset = 0

    @property
    def op_id(self) -> str:
        """Id of the command; ``Sandbox.attach`` finds it again by this."""
        return self._collector.op_id

    @property
    def pid(self) -> int:
        """Process id inside the sandbox, 0 until known."""
        return self._collector.pid

    def stream(self) -> typing.Iterator[types.OutputChunk]:
        """Yields output as it comes, from where the last ``stream()`` stopped, until the command has ended. A cut
        connection is taken up again at the same byte.

        Raises:
            errors.SandboxEndedError: the sandbox is gone and the result with it.
            errors.UnavailableError: the apiserver stayed away.
        """
        failures = 0
        while self._collector.exit is None:
            offsets = self._collector.offsets
            path = f"{self._base}/stream" + _wire.query(
                stdout_offset=offsets["stdout"], stderr_offset=offsets["stderr"]
            )
            try:
                with self._transport.stream("GET", path) as response:
                    for record in self._transport.records(response):
                        failures = 0
                        chunk = self._collector.feed(record)
                        if chunk is not None:
                            yield chunk
            except errors.InfrastructureError as error:
                if self._collector.exit is not None:
                    return
                failures += 1
                if not error.retriable or failures > _RECONNECTS:
                    raise
                _flavor.sleep(min(0.1 * 2**failures, 2.0))

    def stream_text(self) -> typing.Iterator[typing.Tuple[str, str]]:
        """Yields (stream name, text); characters that fall on a chunk's edge are put together, bytes that are not UTF-8
        become U+FFFD."""
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        for chunk in self.stream():
            text = decoders[chunk.stream].decode(chunk.data)
            if text:
                yield chunk.stream, text
        for name, decoder in decoders.items():
            text = decoder.decode(b"", True)
            if text:
                yield name, text

    def wait(self) -> types.ExecResult:
        """Waits for the end and returns the result with all kept output that this object has not dropped."""
        for _ in self.stream():
            pass
        return self._collector.result()

    def status(self) -> dict:
        """Returns the wire status: running, pid, and the result once there is one. Does not wait."""
        response = self._transport.call("GET", self._base)
        return response.json()

    def write(self, data: types.BytesLike) -> None:
        """Writes to stdin; returns when the platform has taken all of it.

        Raises:
            errors.ConflictError: stdin is closed or nobody reads any more.
        """
        rest = types._encode(data)
        while rest:
            piece = rest[: 1 << 18]
            response = self._transport.call(
                "POST", f"{self._base}/stdin" + _wire.query(offset=self._stdin_offset), content=piece, timeout=None
            )
            reply = response.json()
            taken = int(reply["accepted"]) - self._stdin_offset
            self._stdin_offset += taken
            rest = rest[taken:]
            if reply.get("closed") and rest:
                raise errors.ConflictError(
                    "the command does not read its stdin any more", reason="exec.stdin_closed", code="CONFLICT"
                )

    def close_stdin(self) -> None:
        """Sends end of file."""
        self._transport.call("POST", f"{self._base}/stdin" + _wire.query(offset=self._stdin_offset, eof=True))

    def signal(self, number: int = _signal.SIGTERM, *, tree: bool = False) -> None:
        """Sends a signal to the main process, or to every process of the command with ``tree``."""
        self._transport.call("POST", f"{self._base}/signal", body={"signal": int(number), "tree": tree})

    def cancel(self, *, grace: float = 0.0) -> None:
        """Ends the command and its whole tree: TERM, then KILL after ``grace`` seconds. The result is Killed("cancel")."""
        self._transport.call(
            "POST", f"{self._base}/cancel", body={"grace_ms": types._scaled("grace", grace, 1000)}, timeout=grace + 10.0
        )

    def resize(self, rows: int, cols: int) -> None:
        """Sets the size of the terminal.

        Raises:
            errors.ConflictError: the command has no terminal.
        """
        self._transport.call("POST", f"{self._base}/resize", body={"rows": rows, "cols": cols})

    def ack(self) -> None:
        """Says that the result is recorded: the platform may forget the kept output."""
        self._transport.call("POST", f"{self._base}/ack", body={})


def run(transport: Transport, sandbox_id: str, body: dict, cap: typing.Optional[int]) -> types.ExecResult:
    """Runs one attached command to its end with one round trip when it is short.

    A cut connection is taken up again under the same op_id; the command never runs twice. When the caller is interrupted
    the command is cancelled first.
    """
    path = f"/v1/sandboxes/{_wire.segment(sandbox_id)}/exec"
    process = Process(transport, sandbox_id, body["op_id"], cap=body.get("output_bytes") or cap)
    collector = process._collector
    failures = 0
    try:
        while not collector.started:
            try:
                with transport.stream("POST", path, body=body) as response:
                    for record in transport.records(response):
                        collector.feed(record)  # to the reply's end: then the connection serves the next call
                if not collector.started and collector.exit is None:
                    raise errors.UnavailableError(
                        "the reply ended before the command's first record",
                        reason="client.connection", code="UNAVAILABLE", retriable=True,
                    )
            except errors.DSecError as error:
                if collector.started and isinstance(error, errors.InfrastructureError):
                    break
                failures += 1
                if not error.retriable or failures > _RECONNECTS:
                    raise
                _flavor.sleep(min(error.retry_after or 0.1 * 2**failures, 2.0))
        return process.wait()
    except _flavor.INTERRUPTS:
        _flavor.finish(process.cancel, 10.0)
        raise
