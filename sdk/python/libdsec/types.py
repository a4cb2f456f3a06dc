# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of libdsec: plain data, no I/O."""

from __future__ import annotations

import dataclasses
import signal as _signal
import typing

from libdsec import errors

BytesLike = typing.Union[str, bytes]


def _encode(value: BytesLike) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)


@dataclasses.dataclass
class DSecContainerRunArgs:
    """What a container sandbox is made of. Fields left at None take the node's documented defaults.

    Attributes:
        container_image: base layer, ``name:tag`` or ``sha256:...``.
        workspace: workspace layer over the base, or None.
        toolkits: toolkit layers over that, bottom to top.
        memory_limit_mb: MiB of memory, swap and tmpfs included.
        cpu_cores_limit: cores, fractions allowed.
        pids_limit: processes and threads.
        disk_limit_mb: MiB of the writable layer.
        disk_inodes_limit: files in the writable layer.
        shm_size_mb: MiB of /dev/shm.
        open_files_limit: descriptors of one process.
        output_limit_bytes: kept bytes per output stream of one command.
        ttl: lifetime in seconds; 0 = no limit.
        ttl_running_stop: end after so many seconds without activity; 0 = no limit.
        ttl_wait_for_exec: let an attached command run past ``ttl``, at most ``ttl_max_extension`` seconds.
        network_rules: services allowed, by name. Only "nothing allowed" can be enforced so far; anything else is refused
            with :class:`libdsec.errors.UnsupportedError`.
        init_user: user of commands: name, uid or uid:gid.
        env: environment of every command.
        workdir: working folder of commands.
        hostname: host name inside.
        labels: free key/value pairs to find and delete by.
        name: optional name, unique among live sandboxes of its project.
        project: ``root/team/...`` that it belongs to and is charged to; default is the key's own.
        entrypoint: argv of a main process; when it ends the sandbox ends.
        record_first_touch: record what the sandbox reads first of its layers; :meth:`Sandbox.first_touch` saves it. Such a
            sandbox shares no page cache with others, and reads without readahead: it is slower. At most 4 of a node.
    """

    container_image: str
    workspace: typing.Optional[str] = None
    toolkits: typing.Sequence[str] = ()
    memory_limit_mb: typing.Optional[float] = None
    cpu_cores_limit: typing.Optional[float] = None
    pids_limit: typing.Optional[int] = None
    disk_limit_mb: typing.Optional[float] = None
    disk_inodes_limit: typing.Optional[int] = None
    shm_size_mb: typing.Optional[float] = None
    open_files_limit: typing.Optional[int] = None
    output_limit_bytes: typing.Optional[int] = None
    ttl: typing.Optional[float] = None
    ttl_running_stop: typing.Optional[float] = None
    ttl_wait_for_exec: bool = False
    ttl_max_extension: typing.Optional[float] = None
    network_rules: typing.Mapping[str, bool] = dataclasses.field(default_factory=dict)
    init_user: typing.Optional[str] = None
    env: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: typing.Optional[str] = None
    hostname: typing.Optional[str] = None
    labels: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)
    name: typing.Optional[str] = None
    entrypoint: typing.Optional[typing.Sequence[str]] = None
    project: typing.Optional[str] = None
    record_first_touch: bool = False

    _backend: typing.ClassVar[str] = "container"

    def to_wire(self) -> dict:
        """Returns the body of a create request, without ``request_id``.

        Raises:
            errors.UnsupportedError: a network rule allows something.
            errors.InvalidArgumentError: a number is not finite.
        """
        allowed = sorted(name for name, on in self.network_rules.items() if on)
        if allowed:
            raise errors.UnsupportedError(
                f"network rules that allow something ({', '.join(allowed)}) cannot be enforced by this version",
                reason="network.unsupported",
                code="FAILED_PRECONDITION",
                field="network_rules",
            )
        limits = {
            "memory_bytes": _scaled("memory_limit_mb", self.memory_limit_mb, 1 << 20),
            "cpu_millis": _scaled("cpu_cores_limit", self.cpu_cores_limit, 1000),
            "pids": self.pids_limit,
            "disk_bytes": _scaled("disk_limit_mb", self.disk_limit_mb, 1 << 20),
            "disk_inodes": self.disk_inodes_limit,
            "shm_bytes": _scaled("shm_size_mb", self.shm_size_mb, 1 << 20),
            "open_files": self.open_files_limit,
            "output_bytes": self.output_limit_bytes,
        }
        limits = {key: value for key, value in limits.items() if value is not None}
        body: dict = {"backend": self._backend, "base": self.container_image, "network": {"mode": "none"}}
        if self.workspace:
            body["workspace"] = self.workspace
        if self.toolkits:
            body["toolkits"] = list(self.toolkits)
        if limits:
            body["limits"] = limits
        if self.ttl is not None:
            body["ttl_ms"] = _scaled("ttl", self.ttl, 1000)
        if self.ttl_running_stop is not None:
            body["idle_ms"] = _scaled("ttl_running_stop", self.ttl_running_stop, 1000)
        if self.ttl_wait_for_exec:
            body["ttl_policy"] = {"wait_for_exec": True}
            if self.ttl_max_extension is not None:
                body["ttl_policy"]["max_extension_ms"] = _scaled("ttl_max_extension", self.ttl_max_extension, 1000)
        for key, value in (("env", dict(self.env)), ("labels", dict(self.labels))):
            if value:
                body[key] = value
        for key, text in (
            ("workdir", self.workdir),
            ("user", self.init_user),
            ("hostname", self.hostname),
            ("name", self.name),
            ("project", self.project),
        ):
            if text is not None:
                body[key] = text
        if self.entrypoint is not None:
            body["entrypoint"] = list(self.entrypoint)
        if self.record_first_touch:
            body["record_first_touch"] = True
        return body


@dataclasses.dataclass
class DSecMicroVMRunArgs(DSecContainerRunArgs):
    """What a microVM sandbox is made of: a container's arguments, behind a kernel of its own.

    Attributes:
        allow_emulation: take an emulated machine, some ten times slower, where the node has no KVM; ``info["emulated"]`` then
            says so. Otherwise such a node refuses (:class:`libdsec.errors.UnsupportedError`, ``vm.no_acceleration``) unless it
            is set to emulate.
    """

    allow_emulation: bool = False

    _backend: typing.ClassVar[str] = "microvm"

    def to_wire(self) -> dict:
        """As DSecContainerRunArgs.to_wire."""
        body = super().to_wire()
        if self.allow_emulation:
            body.setdefault("labels", {})["dsec.io/allow-emulation"] = "true"
        return body


def _scaled(field: str, value: typing.Optional[float], factor: int) -> typing.Optional[int]:
    """Returns value * factor as an integer; None stays None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) > 1e15:
        raise errors.InvalidArgumentError(
            f"{field}: {value!r} is not a finite number", reason="request.invalid", code="INVALID_ARGUMENT", field=field
        )
    return int(round(value * factor))


# How a command ended. Exactly one of these; compare with isinstance or match.


@dataclasses.dataclass(frozen=True)
class Exited:
    """The main process returned ``code``."""

    code: int


@dataclasses.dataclass(frozen=True)
class Signaled:
    """The main process was ended by a signal that the platform did not send."""

    signal: int

    def __str__(self) -> str:
        try:
            return f"Signaled({_signal.Signals(self.signal).name})"
        except ValueError:
            return f"Signaled({self.signal})"


@dataclasses.dataclass(frozen=True)
class Timeout:
    """The command's own time limit fired; its whole tree was killed."""

    limit_ms: int


@dataclasses.dataclass(frozen=True)
class OomKilled:
    """The memory limit killed it."""

    limit_bytes: int
    victim: str = ""


@dataclasses.dataclass(frozen=True)
class SpawnError:
    """Never started: ``step`` (exec, cwd, user ...) failed with ``errno``."""

    step: str
    errno: int
    errno_name: str = ""
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Killed:
    """Ended by the platform on request: cancel, disconnect, session_close or stop."""

    by: str


@dataclasses.dataclass(frozen=True)
class SandboxEnded:
    """The sandbox ended under the command; never a verdict on the command."""

    cause: str


End = typing.Union[Exited, Signaled, Timeout, OomKilled, SpawnError, Killed, SandboxEnded]


def end_from_wire(result: dict) -> End:
    """Makes the typed end of a wire ``result`` object."""
    kind = result.get("kind")
    if kind == "exited":
        return Exited(int(result.get("exit_code", 0)))
    if kind == "signaled":
        return Signaled(int(result.get("signal", 0)))
    if kind == "timeout":
        return Timeout(int(result.get("limit", 0)))
    if kind == "oom_killed":
        return OomKilled(int(result.get("limit", 0)), str(result.get("oom_victim") or ""))
    if kind == "spawn_error":
        return SpawnError(
            str(result.get("step") or ""),
            int(result.get("errno", 0)),
            str(result.get("errno_name") or ""),
            str(result.get("message") or ""),
        )
    if kind == "killed":
        return Killed(str(result.get("killed_by") or ""))
    if kind == "sandbox_ended":
        return SandboxEnded(str(result.get("killed_by") or result.get("message") or ""))
    raise errors.InfrastructureError(f"unknown end of a command: {kind!r}", reason="client.protocol")


@dataclasses.dataclass
class ExecResult:
    """Everything about a command that has ended.

    Attributes:
        op_id: id of the command.
        end: how it ended, one of the End classes.
        stdout, stderr: kept bytes. When ``stdout_dropped`` is not 0 the middle is missing: head and tail were kept.
        stdout_total, stderr_total: bytes that the command wrote.
        wall_time, user_time, system_time: seconds; CPU times are of the whole process tree.
        peak_memory_bytes: 0 when the host cannot tell.
        oom_events: processes of the command that the memory limit killed.
        left_processes: children outlived the main process and go on.
        raw: the wire object.
    """

    op_id: str
    end: End
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    stdout_dropped: int
    stderr_dropped: int
    wall_time: float
    user_time: float
    system_time: float
    peak_memory_bytes: int
    oom_events: int
    left_processes: bool
    raw: dict = dataclasses.field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """True for exit code 0."""
        return self.end == Exited(0)

    @property
    def exit_code(self) -> typing.Optional[int]:
        """Exit code, or None when the command did not exit by itself."""
        return self.end.code if isinstance(self.end, Exited) else None

    @property
    def truncated(self) -> bool:
        """True when output was dropped."""
        return self.stdout_dropped > 0 or self.stderr_dropped > 0

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD (use ``stdout`` to be exact)."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text, as ``text``."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> "ExecResult":
        """Returns self, or raises :class:`libdsec.errors.CommandError` unless the exit code is 0."""
        if not self.ok:
            raise errors.CommandError(self)
        return self


@dataclasses.dataclass(frozen=True)
class OutputChunk:
    """A piece of output: ``stream`` is "stdout" or "stderr", ``offset`` counts bytes from the start of the stream and
    ``skipped`` is the number of bytes dropped just before it."""

    stream: str
    offset: int
    data: bytes
    skipped: int = 0


@dataclasses.dataclass(frozen=True)
class FileInfo:
    """One file as the sandbox sees it. ``name`` is bytes because names need not be UTF-8; ``mode`` holds permission bits."""

    name: bytes
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: typing.Optional[bytes] = None
    inode: int = 0
    nlink: int = 1

    @property
    def text(self) -> str:
        """Name as text, bytes that are not UTF-8 escaped as os.fsdecode does."""
        return self.name.decode("utf-8", "surrogateescape")


@dataclasses.dataclass(frozen=True)
class WatchEvent:
    """A change below a watched path: created, modified, removed, moved or overflow (changes were missed)."""

    type: str
    path: bytes
