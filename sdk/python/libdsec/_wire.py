# SPDX-License-Identifier: Apache-2.0
"""Conversion between libdsec's types and the HTTP API's JSON; no I/O."""

from __future__ import annotations

import base64
import json
import os
import typing
import urllib.parse
import uuid

from libdsec import errors, types

DEFAULT_ENDPOINT = "http://127.0.0.1:7878"
DEFAULT_KEY_FILE = "/var/lib/dsec/api_key"


def new_id(prefix: str) -> str:
    """Returns a fresh id for idempotency keys."""
    return f"{prefix}-{uuid.uuid4().hex}"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def put_bytes(body: dict, key: str, value: types.BytesLike) -> None:
    """Sets ``key`` when the value is UTF-8 text, else its base64 twin ``key_b64``."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
            body[key] = value
            return
        except UnicodeEncodeError:
            value = value.encode("utf-8", "surrogateescape")
    try:
        body[key] = value.decode("utf-8")
    except UnicodeDecodeError:
        body[key + "_b64"] = b64(value)


def put_env(body: dict, env: typing.Mapping[str, types.BytesLike]) -> None:
    """Sets ``env`` and, for values that are not UTF-8, ``env_b64``."""
    for key, value in env.items():
        holder: dict = {}
        put_bytes(holder, "v", value)
        if "v" in holder:
            body.setdefault("env", {})[key] = holder["v"]
        else:
            body.setdefault("env_b64", {})[key] = holder["v_b64"]


def get_bytes(record: dict, key: str) -> bytes:
    """Reads ``key_b64`` when present, else ``key`` as UTF-8."""
    if record.get(key + "_b64") is not None:
        return base64.b64decode(record[key + "_b64"])
    return str(record.get(key) or "").encode("utf-8", "surrogateescape")


def query(**parameters: typing.Any) -> str:
    """Returns ``?a=b`` with bytes-exact percent-encoding; None is left out, bools become true/false."""
    parts = []
    for key, value in parameters.items():
        if value is None:
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        for item in values:
            if isinstance(item, bool):
                item = "true" if item else "false"
            elif not isinstance(item, (str, bytes)):
                item = str(item)
            if isinstance(item, str):
                item = item.encode("utf-8", "surrogateescape")
            parts.append(f"{key}={urllib.parse.quote(item, safe='/:=')}")
    return "?" + "&".join(parts) if parts else ""


def segment(value: types.BytesLike) -> str:
    """Percent-encodes one path segment of a URL."""
    return urllib.parse.quote(value, safe="")


def exec_body(
    *,
    op_id: str,
    argv: typing.Optional[typing.Sequence[types.BytesLike]] = None,
    script: typing.Optional[types.BytesLike] = None,
    cwd: typing.Optional[types.BytesLike] = None,
    env: typing.Optional[typing.Mapping[str, types.BytesLike]] = None,
    user: typing.Optional[str] = None,
    stdin: typing.Optional[types.BytesLike] = None,
    stdin_open: bool = False,
    tty: typing.Optional[typing.Tuple[int, int]] = None,
    timeout: typing.Optional[float] = None,
    output_bytes: typing.Optional[int] = None,
    merged: bool = False,
    session: typing.Optional[str] = None,
    detached: bool = False,
    group_kill: bool = False,
    shell: typing.Optional[str] = None,
    on_disconnect: typing.Optional[str] = None,
) -> dict:
    """Returns the body of an exec request."""
    body: dict = {"op_id": op_id}
    if argv is not None:
        if isinstance(argv, (str, bytes)):
            raise errors.InvalidArgumentError(
                "argv must be a sequence of strings; use run_shell() for a script",
                reason="request.invalid",
                code="INVALID_ARGUMENT",
                field="argv",
            )
        try:
            body["argv"] = [item if isinstance(item, str) else item.decode("utf-8") for item in argv]
            json.dumps(body["argv"], ensure_ascii=False).encode("utf-8")
        except (UnicodeDecodeError, UnicodeEncodeError):
            body.pop("argv", None)
            body["argv_b64"] = [b64(types._encode(item)) for item in argv]
    if script is not None:
        put_bytes(body, "script", script)
    if cwd is not None:
        put_bytes(body, "cwd", cwd)
    put_env(body, env or {})
    if user is not None:
        body["user"] = user
    if stdin is not None:
        put_bytes(body, "stdin", stdin)
    if tty is not None:
        body["tty"] = {"rows": tty[0], "cols": tty[1]}
    if timeout is not None:
        body["timeout_ms"] = types._scaled("timeout", timeout, 1000)
    for key, value in (("output_bytes", output_bytes), ("session", session), ("shell", shell), ("on_disconnect", on_disconnect)):
        if value is not None:
            body[key] = value
    for key, flag in (("stdin_open", stdin_open), ("merged", merged), ("detached", detached), ("group_kill", group_kill)):
        if flag:
            body[key] = True
    return body


class KeptBytes:
    """Head and tail of one stream within a cap; a reader that keeps up is sent more than the platform itself would keep."""

    def __init__(self, cap: typing.Optional[int]):
        self._cap = cap
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        if self._cap is None:
            self._head += data
            return
        room = self._cap - len(self._head)
        self._head += data[: max(0, room)]
        self._tail += data[max(0, room):]
        if len(self._tail) > 2 * self._cap + 65536:
            del self._tail[: len(self._tail) - self._cap]

    def value(self) -> bytes:
        if not self._tail:
            return bytes(self._head)
        tail = (self._cap or 0) - (self._cap or 0) // 2
        whole_tail = bytes(self._tail[-tail:]) if len(self._tail) >= tail else bytes(self._head[len(self._head) - tail + len(self._tail):]) + bytes(self._tail)
        return bytes(self._head[: (self._cap or 0) // 2]) + whole_tail


class OutputCollector:
    """Puts stream records of one exec together; knows where to go on after a cut. Keeps at most ``cap`` bytes of a stream."""

    def __init__(self, op_id: str, cap: typing.Optional[int] = None):
        self.op_id = op_id
        self.pid = 0
        self.started = False
        self.offsets = {"stdout": 0, "stderr": 0}
        self.kept = {"stdout": KeptBytes(cap), "stderr": KeptBytes(cap)}
        self.exit: typing.Optional[dict] = None

    def feed(self, record: dict) -> typing.Optional[types.OutputChunk]:
        """Takes one record; returns the output that it brings, if any."""
        kind = record.get("type")
        if kind == "started":
            self.started = True
            self.op_id = record.get("op_id", self.op_id)
            self.pid = int(record.get("pid", 0))
        elif kind in ("stdout", "stderr"):
            data = base64.b64decode(record["data_b64"])
            offset = int(record["offset"])
            chunk = types.OutputChunk(kind, offset, data, int(record.get("skipped", 0)))
            self.offsets[kind] = offset + len(data)
            self.kept[kind].add(data)
            return chunk
        elif kind == "exit":
            self.exit = record
        elif kind == "error":
            raise errors.from_body(record.get("error", {}), 0)
        return None

    def result(self) -> types.ExecResult:
        """The result; requires that the exit record was fed."""
        assert self.exit is not None
        wire = self.exit.get("result", {})
        kept = {name: self.kept[name].value() for name in ("stdout", "stderr")}
        totals = {name: int((self.exit.get(name) or {}).get("total", 0)) for name in ("stdout", "stderr")}
        return types.ExecResult(
            op_id=self.op_id,
            end=types.end_from_wire(wire),
            stdout=kept["stdout"],
            stderr=kept["stderr"],
            stdout_total=totals["stdout"],
            stderr_total=totals["stderr"],
            stdout_dropped=max(0, totals["stdout"] - len(kept["stdout"])),
            stderr_dropped=max(0, totals["stderr"] - len(kept["stderr"])),
            wall_time=int(wire.get("wall_usec", 0)) / 1e6,
            user_time=int(wire.get("user_usec", 0)) / 1e6,
            system_time=int(wire.get("system_usec", 0)) / 1e6,
            peak_memory_bytes=int(wire.get("peak_memory_bytes", 0)),
            oom_events=int(wire.get("oom_events", 0)),
            left_processes=bool(wire.get("left_processes", False)),
            raw=wire,
        )


def file_info(record: dict) -> types.FileInfo:
    """Makes a FileInfo of a wire stat object."""
    target = None
    if record.get("target") is not None or record.get("target_b64") is not None:
        target = get_bytes(record, "target")
    return types.FileInfo(
        name=get_bytes(record, "name"),
        type=str(record["type"]),
        mode=int(str(record["mode"]), 8),
        uid=int(record["uid"]),
        gid=int(record["gid"]),
        size=int(record["size"]),
        mtime_ns=int(record["mtime_ns"]),
        target=target,
        inode=int(record.get("inode", 0)),
        nlink=int(record.get("nlink", 1)),
    )


def load_settings(
    endpoint: typing.Optional[str], api_key: typing.Optional[str]
) -> typing.Tuple[str, str]:
    """Returns (endpoint, key): arguments first, then DSEC_URL / DSEC_API_KEY / DSEC_API_KEY_FILE, then the config file
    (``$DSEC_CONFIG`` or ``~/.config/dsec/config.toml`` with ``url``, ``api_key`` or ``api_key_file``), then the local node."""
    settings: dict = {}
    path = os.environ.get("DSEC_CONFIG") or os.path.expanduser("~/.config/dsec/config.toml")
    if os.path.exists(path):
        try:
            import tomllib  # Python 3.11
        except ImportError:
            raise errors.DSecError(f"{path} needs Python 3.11 or newer; set DSEC_URL and DSEC_API_KEY instead") from None
        with open(path, "rb") as file:
            try:
                settings = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise errors.DSecError(f"{path}: {error}", reason="client.config") from error
    url = endpoint or os.environ.get("DSEC_URL") or settings.get("url") or DEFAULT_ENDPOINT
    key = api_key or os.environ.get("DSEC_API_KEY") or settings.get("api_key")
    if not key:
        key_file = os.environ.get("DSEC_API_KEY_FILE") or settings.get("api_key_file") or DEFAULT_KEY_FILE
        try:
            with open(key_file, encoding="ascii") as file:
                key = file.read().strip()
        except OSError as error:
            raise errors.UnauthenticatedError(
                f"no API key: give api_key, set DSEC_API_KEY or make {key_file} readable ({error.strerror})",
                reason="auth.missing",
                code="UNAUTHENTICATED",
            ) from error
    return url.rstrip("/"), key
