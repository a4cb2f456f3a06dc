# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""Client and sandbox."""

from __future__ import annotations

import time
import typing

from libdsec import _wire, errors, types
from libdsec import fncall as _fn
from libdsec._sync import fncall as _fncall
from libdsec._sync import process as _process
from libdsec._sync.files import Files, PathLike
from libdsec._sync.iam import Iam
from libdsec._sync.process import Process
from libdsec._sync.transport import Transport


class Session:
    """A named shell whose working folder, environment and functions last from one command to the next."""

    def __init__(self, sandbox: "Sandbox", name: str):
        self._sandbox = sandbox
        self.name = name

    def run(self, script: types.BytesLike, **options: typing.Any) -> types.ExecResult:
        """Runs a script in the session; options as ``Sandbox.run_shell``. A timeout ends the script, not the session."""
        return self._sandbox.run_shell(script, session=self.name, **options)

    def close(self) -> None:
        """Ends the shell and every process that it left."""
        self._sandbox._transport.call("DELETE", f"{self._sandbox._base}/sessions/{_wire.segment(self.name)}")


class Sandbox:
    """One sandbox. Get it from ``DSecClient.run_container``, ``run_many``, ``get`` or ``list``.

    Use as a context manager to stop it at the end of a block.
    """

    def __init__(self, transport: Transport, info: dict):
        self._transport = transport
        self.info = info
        self._base = f"/v1/sandboxes/{_wire.segment(info['id'])}"
        self.files = Files(transport, info["id"])

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.state}>"

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _cap(self) -> typing.Optional[int]:
        return self.info.get("limits", {}).get("output_bytes")

    @property
    def id(self) -> str:
        """Opaque id."""
        return self.info["id"]

    @property
    def state(self) -> str:
        """State as of the last reply about this sandbox; ``refresh()`` asks again."""
        return self.info["state"]

    def refresh(self) -> dict:
        """Asks for the present record, also after the end; returns and keeps it."""
        self.info = (self._transport.call("GET", self._base)).json()
        return self.info

    def exec(self, argv: typing.Sequence[types.BytesLike], **options: typing.Any) -> types.ExecResult:
        """Runs a program without a shell and waits for it. Options as ``run_shell``."""
        options.setdefault("op_id", _wire.new_id("op"))
        return _process.run(self._transport, self.id, _wire.exec_body(argv=argv, **options), self._cap)

    def run_shell(self, script: types.BytesLike, **options: typing.Any) -> types.ExecResult:
        """Runs a shell script of any size and waits for its end.

        Args:
            script: text or bytes; given to the shell byte-exact by file descriptor.
            timeout: seconds, after which the whole process tree is killed (end Timeout). None: the node's default.
            cwd, env, user: override the sandbox's defaults; env values may be bytes.
            stdin: bytes for stdin; default: end of file at once.
            output_bytes: kept bytes per stream.
            merged: stderr goes into stdout in exact write order.
            session: name of a session to run in.
            group_kill: an OOM kill of any process ends the whole command.
            shell: path of the shell.
            op_id: idempotency key; the same key never runs twice, a repeat returns the recorded result.

        Returns:
            ExecResult; a failing command is a result, not an exception.

        Raises:
            errors.SandboxEndedError, errors.NotFoundError, errors.InvalidArgumentError, errors.InfrastructureError.
        """
        options.setdefault("op_id", _wire.new_id("op"))
        return _process.run(self._transport, self.id, _wire.exec_body(script=script, **options), self._cap)

    def start(
        self,
        argv: typing.Optional[typing.Sequence[types.BytesLike]] = None,
        *,
        script: typing.Optional[types.BytesLike] = None,
        **options: typing.Any,
    ) -> Process:
        """Starts a command and returns at once. It runs detached: it has no time limit unless ``timeout`` is given and
        outlives this client. Options as ``run_shell``, and ``stdin_open=True`` to write to it, ``tty=(rows, cols)``."""
        options.setdefault("op_id", _wire.new_id("op"))
        body = _wire.exec_body(argv=argv, script=script, detached=True, **options)
        until = time.monotonic() + 30.0
        reply = (self._transport.call("POST", f"{self._base}/exec", body=body, retry_until=until)).json()
        return Process(self._transport, self.id, reply["op_id"], int(reply.get("pid", 0)), options.get("output_bytes") or self._cap)

    def attach(self, op_id: str) -> Process:
        """Finds a command again, running or ended; its output can be read from the first byte.

        Raises:
            errors.NotFoundError: no such command, or its result was acknowledged and forgotten.
        """
        process = Process(self._transport, self.id, op_id, cap=self._cap)
        process._collector.pid = int((process.status()).get("pid", 0))
        return process

    def pty(self, argv: typing.Optional[typing.Sequence[types.BytesLike]] = None, *, rows: int = 24, cols: int = 80,
                  **options: typing.Any) -> Process:
        """Starts a program on a terminal (default: a login shell)."""
        return self.start(argv or ["/bin/sh", "-l"], tty=(rows, cols), stdin_open=True, **options)

    def session(self, name: str) -> Session:
        """A named session; made by its first command."""
        return Session(self, name)

    def sessions(self) -> "list[dict]":
        """Lists live sessions."""
        return (self._transport.call("GET", f"{self._base}/sessions")).json()["sessions"]

    def execs(self) -> "list[dict]":
        """Lists commands that run or whose result is kept."""
        return (self._transport.call("GET", f"{self._base}/exec")).json()["execs"]

    def upload_dir(self, local: PathLike, path: PathLike, **options: typing.Any) -> dict:
        """See ``files.upload_dir``."""
        return self.files.upload_dir(local, path, **options)

    def download_dir(self, path: PathLike, local: PathLike) -> "list[str]":
        """See ``files.download_dir``."""
        return self.files.download_dir(path, local)

    def pack_diff(
        self,
        name: typing.Optional[str] = None,
        *,
        kind: str = "workspace",
        labels: typing.Optional[typing.Mapping[str, str]] = None,
        scrub: typing.Sequence[str] = (),
        default_scrub: bool = True,
        canary_paths: typing.Sequence[str] = (),
        canary_contents: typing.Sequence[types.BytesLike] = (),
        on_progress: typing.Optional[typing.Callable[[dict], None]] = None,
        timeout: float = 600.0,
    ) -> dict:
        """Makes a layer of what changed in the sandbox since its creation, as it is at one moment; the sandbox runs on.

        Args:
            name: NAME[:TAG] of the layer; without one it is reached by its id.
            kind: what it is to be used as, workspace or toolkit.
            labels: of the layer.
            scrub: patterns of paths to leave out (fnmatch; with a / at the start a whole path, else a name anywhere).
            default_scrub: leave out temporary files, logs, histories and caches too.
            canary_paths, canary_contents: patterns of paths, and texts or bytes in files, that must not be in the layer.
            on_progress: called with each record of progress: phase, entries, bytes, total_bytes.
            timeout: seconds for the whole.

        Returns:
            ``{"layer": {"id": ..., "names": ..., ...}, "existed": ..., "scrubbed": ..., "warnings": ..., "frozen_us": ...}``

        Raises:
            errors.ConflictError: ``pack.canary``: something that must not be in it is, with path and rule;
                ``pack.under_way``: another pack of this sandbox has not ended.
            errors.SandboxEndedError, errors.NotFoundError, errors.InvalidArgumentError, errors.InfrastructureError.
        """
        body: typing.Dict[str, typing.Any] = {
            "kind": kind,
            "labels": dict(labels or {}),
            "scrub": list(scrub),
            "default_scrub": default_scrub,
            "canary_paths": list(canary_paths),
            "timeout_ms": max(1, types._scaled("timeout", timeout, 1000) or 0),
        }
        if name is not None:
            body["name"] = name
        if canary_contents:
            body["canary_contents_b64"] = [_wire.b64(types._encode(item)) for item in canary_contents]
        with self._transport.stream("POST", f"{self._base}/pack", body=body) as response:
            for record in self._transport.records(response):
                kind_of = record.pop("type")
                if kind_of == "layer":
                    return record
                if kind_of == "error":
                    raise errors.from_body(record["error"], 0)
                if on_progress is not None:
                    on_progress(record)
        raise errors.UnavailableError("the reply ended before its last record", reason="client.connection", code="UNAVAILABLE")

    def first_touch(self, *, save: bool = False, merge: bool = False, stop: bool = False) -> dict:
        """What the sandbox, created with ``record_first_touch``, has read first of its layers since then.

        Args:
            save: put it beside each layer, in place of what is there: nodes that mount the layer from now on read it ahead.
            merge: with ``save``: behind what is there, without what that has already.
            stop: record nothing after this.

        Returns:
            ``{"layers": [{"id", "parts", "bytes", "saved", "saved_parts", "saved_bytes"}, ...], "lost", "truncated",
            "stopped"}``, layers lowest first. A layer of which nothing was read is not saved. ``lost``: reads that are
            missing because the kernel had no room for them.

        Raises:
            errors.ConflictError: ``trace.not_recording``: it was created without, or its node's daemon was restarted.
            errors.SandboxEndedError, errors.NotFoundError, errors.InfrastructureError.
        """
        body = {"save": save, "merge": merge, "stop": stop}
        return (self._transport.call("POST", f"{self._base}/first-touch", body=body)).json()

    def stats(self) -> dict:
        """Usage beside limits. Does not count as activity."""
        return (self._transport.call("GET", f"{self._base}/stats")).json()

    def events(self, *, after: int = 0, follow: bool = False) -> typing.Iterator[dict]:
        """Yields events in order from sequence number ``after`` + 1; with ``follow`` until the sandbox has ended."""
        url = f"{self._base}/events" + _wire.query(after=after, follow=follow)
        with self._transport.stream("GET", url) as response:
            for record in self._transport.records(response):
                yield record

    def renew(self, *, ttl: typing.Optional[float] = None, idle: typing.Optional[float] = None) -> dict:
        """Sets a new lifetime counted from now, or a new idle time, in seconds (0 = none)."""
        body = {}
        if ttl is not None:
            body["ttl_ms"] = types._scaled("ttl", ttl, 1000)
        if idle is not None:
            body["idle_ms"] = types._scaled("idle", idle, 1000)
        self.info = (self._transport.call("POST", f"{self._base}/renew", body=body)).json()
        return self.info

    def stop(self, *, grace: float = 0.0) -> dict:
        """Ends the sandbox: TERM to everything inside, KILL after ``grace`` seconds. Returns its final record. Safe to
        repeat."""
        url = self._base + _wire.query(grace_ms=types._scaled("grace", grace, 1000))
        until = time.monotonic() + 30.0
        self.info = (self._transport.call("DELETE", url, timeout=grace + 60.0, retry_until=until)).json()
        return self.info


class DSecClient:
    """Entry to the platform.

    Args:
        endpoint: URL of an apiserver, or ``unix:/path``; default from DSEC_URL, the config file, or the local node.
        api_key: default from DSEC_API_KEY, DSEC_API_KEY_FILE, the config file, or the local node's key file.
        max_connections: bound on parallel requests.
    """

    def __init__(self, endpoint: typing.Optional[str] = None, api_key: typing.Optional[str] = None, *,
                 max_connections: int = 256):
        self._endpoint = endpoint
        self._api_key = api_key
        self._max_connections = max_connections
        self._opened: typing.Optional[Transport] = None

    def open(self) -> "DSecClient":
        """Reads the settings, checks endpoint and key; raises UnauthenticatedError or UnavailableError."""
        endpoint, key = _wire.load_settings(self._endpoint, self._api_key)
        transport = Transport(endpoint, key, self._max_connections)
        try:
            transport.call("GET", "/v1/node", timeout=10.0)
        except BaseException:
            transport.close()
            raise
        self._opened = transport
        return self

    def close(self) -> None:
        """Closes the connections. Sandboxes stay."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def __enter__(self) -> "DSecClient":
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _transport(self) -> Transport:
        if self._opened is None:
            raise errors.DSecError("call open() first", reason="client.not_open", code="FAILED_PRECONDITION")
        return self._opened

    @property
    def iam(self) -> Iam:
        """Projects, principals, keys, grants, quotas, audit."""
        return Iam(self._transport)

    def run_container(self, args: types.DSecContainerRunArgs, *, timeout: float = 120.0,
                            request_id: typing.Optional[str] = None) -> Sandbox:
        """Makes a container sandbox and returns it when it is ready for commands.

        Args:
            timeout: seconds for the whole creation, waiting for capacity included; at most 600.
            request_id: idempotency key; a repeat with the same key and args returns the same sandbox.

        Raises:
            errors.NoCapacityError: still no capacity after ``timeout``.
            errors.NotFoundError: ``layer.not_found``.
            errors.InvalidArgumentError, errors.UnsupportedError, errors.ConflictError, errors.InfrastructureError.
        """
        fixed = {**args.to_wire(), "request_id": request_id or _wire.new_id("req")}
        until = time.monotonic() + (types._scaled("timeout", timeout, 1000) or 0) / 1000

        def body() -> dict:
            left = max(1, round((until - time.monotonic()) * 1000))
            # Less than the whole, so that the answer is "no capacity" and not "no time".
            return {**fixed, "timeout_ms": left, "capacity_wait_ms": left - min(1000, left // 2)}

        response = self._transport.call("POST", "/v1/sandboxes", body=body, timeout=timeout + 5.0, retry_until=until)
        return Sandbox(self._transport, response.json())

    def run_microvm(self, args: types.DSecMicroVMRunArgs, *, timeout: float = 120.0,
                          request_id: typing.Optional[str] = None) -> Sandbox:
        """Makes a microVM sandbox; all else as ``run_container``, and so is the sandbox.

        Raises:
            errors.UnsupportedError: ``vm.no_acceleration`` when the node has no KVM and neither it nor ``args`` allows emulation,
                ``backend.unusable`` when it has no QEMU or no guest image.
            As run_container.
        """
        return self.run_container(args, timeout=timeout, request_id=request_id)

    def run_many(self, args: types.DSecContainerRunArgs, n: int, *, request_id: typing.Optional[str] = None,
                       timeout: float = 120.0) -> typing.Iterator[typing.Union[Sandbox, errors.DSecError]]:
        """Makes ``n`` equal sandboxes in one call and yields each as it becomes ready; one that could not be made comes as
        its exception, not raised, so that the others are not lost."""
        sandbox = args.to_wire()
        sandbox["timeout_ms"] = max(1, types._scaled("timeout", timeout, 1000) or 0)
        body = {"request_id": request_id or _wire.new_id("req"), "count": n, "sandbox": sandbox}
        with self._transport.stream("POST", "/v1/sandboxes:batch", body=body) as response:
            for record in self._transport.records(response):
                if record["type"] == "sandbox":
                    yield Sandbox(self._transport, record["sandbox"])
                elif record["type"] == "error":
                    yield errors.from_body(record["error"], 0)

    def get(self, sandbox_id: str) -> Sandbox:
        """Finds a sandbox by id, also one that has ended (within the retention time)."""
        response = self._transport.call("GET", f"/v1/sandboxes/{_wire.segment(sandbox_id)}")
        return Sandbox(self._transport, response.json())

    def list(self, *, labels: typing.Optional[typing.Mapping[str, str]] = None,
                   states: typing.Sequence[str] = (), name: typing.Optional[str] = None, include_ended: bool = False,
                   project: typing.Optional[str] = None, page_size: int = 500) -> typing.Iterator[Sandbox]:
        """Yields the sandboxes that the key sees, page by page; ended ones only with ``include_ended``; with ``project`` those of
        it and of what is below."""
        token = None
        while True:
            url = "/v1/sandboxes" + _wire.query(
                state=list(states),
                label=[f"{key}={value}" for key, value in (labels or {}).items()],
                name=name,
                include_ended=include_ended,
                project=project,
                page_size=page_size,
                page_token=token,
            )
            page = (self._transport.call("GET", url)).json()
            for record in page["sandboxes"]:
                yield Sandbox(self._transport, record)
            token = page.get("next_page_token")
            if not token:
                return

    def delete(self, sandbox_id: str, *, grace: float = 0.0) -> dict:
        """Ends a sandbox by id; returns its final record. Safe to repeat."""
        url = f"/v1/sandboxes/{_wire.segment(sandbox_id)}" + _wire.query(grace_ms=types._scaled("grace", grace, 1000))
        until = time.monotonic() + 30.0
        return (self._transport.call("DELETE", url, timeout=grace + 60.0, retry_until=until)).json()

    def delete_by_label(self, labels: typing.Mapping[str, str], *, grace: float = 0.0) -> typing.Iterator[dict]:
        """Ends all sandboxes that bear the labels; yields one record for each: ``{"type": "deleted"|"error", "id": ...}``."""
        body = {"labels": dict(labels), "grace_ms": types._scaled("grace", grace, 1000)}
        with self._transport.stream("POST", "/v1/sandboxes:delete", body=body, silence=60.0) as response:
            for record in self._transport.records(response):
                if record["type"] != "done":
                    yield record

    def events(self, *, after: int = 0, follow: bool = False) -> typing.Iterator[dict]:
        """Yields events of all sandboxes of the node in order."""
        url = "/v1/events" + _wire.query(after=after, follow=follow)
        with self._transport.stream("GET", url) as response:
            for record in self._transport.records(response):
                yield record

    def node(self) -> dict:
        """What the node is and can do (the table of ``dsec doctor``) and its load."""
        return (self._transport.call("GET", "/v1/node")).json()

    def layers(
        self,
        *,
        kind: typing.Optional[str] = None,
        prefix: typing.Optional[str] = None,
        labels: typing.Optional[typing.Mapping[str, str]] = None,
    ) -> typing.Iterator[dict]:
        """Yields layers in order of id, fetched page by page: of one kind (base, workspace, toolkit), with a name or id that
        begins with ``prefix``, with all ``labels``."""
        wanted = [f"{key}={value}" for key, value in (labels or {}).items()]
        token = ""
        while True:
            url = "/v1/layers" + _wire.query(
                kind=kind, prefix=prefix, label=wanted, page_size=1000, page_token=token or None
            )
            page = (self._transport.call("GET", url)).json()
            for layer in page["layers"]:
                yield layer
            token = page["next_page_token"]
            if not token:
                return

    def collect_layers(
        self,
        *,
        unnamed_for: float = 604800.0,
        grace: float = 600.0,
        dry_run: bool = False,
        timeout: float = 600.0,
    ) -> dict:
        """Removes layers that no name leads to, and deletes files of removed layers that no node can have mounted. Of the whole
        store; safe to repeat.

        Args:
            unnamed_for: seconds; only layers without a name or use for so long.
            grace: seconds that files of removed layers are kept.
            dry_run: only say what would be removed.
            timeout: seconds for the whole; what was begun goes on afterwards.

        Returns:
            ``{"removed": [id, ...], "removed_bytes": ..., "in_use": [{"id": ..., "by": ...}, ...], "young": ..., "waiting": ...,
            "deleted": ..., "dry_run": ...}``

        Raises:
            errors.InfrastructureError: ``layer.bad_lease``: a lease cannot be read, and might list anything.
            errors.UnavailableError: ``layer.unreachable``: the store did not answer in time.
        """
        body = {
            "unnamed_for_ms": types._scaled("unnamed_for", unnamed_for, 1000),
            "grace_ms": types._scaled("grace", grace, 1000),
            "dry_run": dry_run,
            "timeout_ms": max(1, types._scaled("timeout", timeout, 1000) or 0),
        }
        return (self._transport.call("POST", "/v1/layers:collect", body=body, timeout=timeout + 30.0)).json()

    def layer_nodes(self) -> typing.List[dict]:
        """Which nodes have layers of the store in use: ``{"node": ..., "epoch": ..., "layers": ..., "renewed_unix_ms": ...}``
        each."""
        return (self._transport.call("GET", "/v1/layer_nodes")).json()["nodes"]

    def forget_layer_node(self, node: str) -> None:
        """Says that a node is gone for good, so that its layers may be removed. If it is not, what runs on it is at risk.

        Raises:
            errors.NotFoundError: ``layer.no_lease``.
        """
        self._transport.call("DELETE", f"/v1/layer_nodes/{_wire.segment(node)}")

    def call(self, args: _fn.DSecFnCallArgs, *, timeout: float = 600.0) -> _fn.FnResult:
        """Runs one stateless call to its verdict; nothing of it stays.

        Args:
            timeout: seconds for everything, waiting for a worker included; a cut connection or a full queue is tried again
                within it, and the call never runs twice.

        Returns:
            FnResult, whatever the verdict; ``check()`` raises when it is not OK.

        Raises:
            errors.NotFoundError: ``fn.type_not_found``, ``artifact.not_found``, ``layer.not_found``.
            errors.InvalidArgumentError, errors.ConflictError, errors.NoCapacityError, errors.InfrastructureError.
        """
        return _fncall.call(self._transport, args, timeout)

    def call_many(self, calls: typing.Iterable[_fn.DSecFnCallArgs], *, concurrency: int = 256, batch: int = 1024,
                        timeout: float = 600.0) -> typing.Iterator[typing.Tuple[int, _fncall.Outcome]]:
        """Runs calls, taken from the iterable as there is room, and yields (index, FnResult) as each ends. A call that the
        platform refused comes as (index, exception), not raised, so that the others are not lost.

        Args:
            concurrency: calls under way at once, at most 256.
            batch: calls in one request.
            timeout: seconds without any outcome after which faults of the platform are no longer waited out.
        """
        for outcome in _fncall.call_many(self._transport, calls, concurrency, batch, timeout):
            yield outcome

    def function(self, target: typing.Optional[typing.Callable] = None, *, timeout: float = 600.0,
                 **options: typing.Any) -> typing.Any:
        """Decorator: a Python function that runs in the sandbox when it is called. Options as ``libdsec.function``."""

        def decorate(inner: typing.Callable) -> _fncall.Function:
            return _fncall.Function(self, inner, timeout, **options)

        return decorate(target) if target is not None else decorate

    def fn_result(self, op_id: str, *, wait: float = 0.0) -> typing.Optional[_fn.FnResult]:
        """The kept result of a call, or None when it still runs after ``wait`` seconds.

        Raises:
            errors.NotFoundError: ``fn.op_not_found``: never seen, or no longer kept.
        """
        return _fncall.result(self._transport, op_id, wait)

    def fn_types(self) -> "list[dict]":
        """Lists the task types."""
        return (self._transport.call("GET", "/v1/fn/types")).json()["types"]

    def put_fn_type(self, name: str, task_type: typing.Mapping[str, typing.Any]) -> dict:
        """Makes or replaces a task type; returns it as the node keeps it."""
        path = f"/v1/fn/types/{_wire.segment(name)}"
        return (self._transport.call("PUT", path, body=dict(task_type))).json()

    def delete_fn_type(self, name: str) -> None:
        """Removes a task type that was put."""
        self._transport.call("DELETE", f"/v1/fn/types/{_wire.segment(name)}")

    def put_artifact(self, data: bytes) -> str:
        """Gives bytes to the node; returns their digest, for FnFile. They are kept until room is needed."""
        return (self._transport.call("PUT", "/v1/fn/artifacts", content=bytes(data), timeout=None)).json()["artifact"]

    def get_artifact(self, digest: str) -> bytes:
        """The bytes of an artefact."""
        return (self._transport.call("GET", f"/v1/fn/artifacts/{_wire.segment(digest)}", timeout=None)).content

    def fn_pools(self) -> "list[dict]":
        """Lists the pools of workers and what they do."""
        return (self._transport.call("GET", "/v1/fn/pools")).json()["pools"]
