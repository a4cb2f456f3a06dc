# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of FnCall, and Python functions as calls: plain data, no I/O."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import inspect
import json
import textwrap
import types as _types
import typing

from libdsec import _wire, errors
from libdsec.types import BytesLike, _encode, _scaled


class FnVerdict(str, enum.Enum):
    """How a call ended. Everything but INFRASTRUCTURE is a verdict on the program."""

    OK = "OK"
    COMPILE_ERROR = "COMPILE_ERROR"
    WRONG_EXIT = "WRONG_EXIT"
    SIGNALED = "SIGNALED"
    TIME_LIMIT = "TIME_LIMIT"
    MEMORY_LIMIT = "MEMORY_LIMIT"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"
    PROCESS_LIMIT = "PROCESS_LIMIT"
    INFRASTRUCTURE = "INFRASTRUCTURE"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class FnLimits:
    """Bounds of one step; None takes the default of the task type, then of the node. Times in seconds, ``*_mb`` in MiB."""

    wall: typing.Optional[float] = None
    cpu: typing.Optional[float] = None
    memory_mb: typing.Optional[float] = None
    processes: typing.Optional[int] = None
    output_bytes: typing.Optional[int] = None
    file_mb: typing.Optional[float] = None
    disk_mb: typing.Optional[float] = None
    disk_inodes: typing.Optional[int] = None

    def to_wire(self) -> dict:
        """The limits that are set."""
        wire = {
            "wall_ms": _scaled("wall", self.wall, 1000),
            "cpu_ms": _scaled("cpu", self.cpu, 1000),
            "memory_bytes": _scaled("memory_mb", self.memory_mb, 1 << 20),
            "processes": self.processes,
            "output_bytes": self.output_bytes,
            "file_bytes": _scaled("file_mb", self.file_mb, 1 << 20),
            "disk_bytes": _scaled("disk_mb", self.disk_mb, 1 << 20),
            "disk_inodes": self.disk_inodes,
        }
        return {key: value for key, value in wire.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class FnFile:
    """A file of a call's working folder: bytes, or an ``artifact`` that the node keeps."""

    path: str
    content: BytesLike = b""
    artifact: typing.Optional[str] = None
    mode: typing.Optional[int] = None

    def to_wire(self) -> dict:
        """The file as the API takes it."""
        wire: dict = {"path": self.path}
        if self.artifact is not None:
            wire["artifact"] = self.artifact
        else:
            _wire.put_bytes(wire, "content", self.content)
        if self.mode is not None:
            wire["mode"] = f"0{self.mode:o}"
        return wire


@dataclasses.dataclass(frozen=True)
class FnGpu:
    """GPUs of a call: ``kind`` is "whole" or a MIG profile; ``shared`` ones may serve other shared calls as well."""

    count: int = 1
    kind: str = "whole"
    shared: bool = False


@dataclasses.dataclass
class DSecFnCallArgs:
    """One stateless call: a program, what it gets and its bounds.

    Attributes:
        type: name of a task type: c, cpp, python, go, java, javascript, bash, or one of your own.
        code: the source; goes to the file that the type names.
        files: further files, as a mapping of path to content or a sequence of FnFile.
        stdin: bytes for stdin.
        args: arguments of the program.
        limits, compile_limits: bounds of the run and of the compile step.
        fetch: files to bring back: relative paths; ``dir/`` brings a folder.
        keep_artifacts: fetched files stay on the node; the result has their digests and not their bytes.
        compile_only: the compile step alone; what it made is what is fetched.
        container_image, workspace, toolkits: layers in place of the type's environment.
        gpu: devices.
        env: environment of the program.
        op_id: idempotency key; a repeat joins the call or answers its kept result. Made up when None.
    """

    type: str
    code: typing.Optional[BytesLike] = None
    files: typing.Union[typing.Mapping[str, BytesLike], typing.Sequence[FnFile]] = ()
    stdin: typing.Optional[BytesLike] = None
    args: typing.Sequence[str] = ()
    limits: typing.Optional[FnLimits] = None
    compile_limits: typing.Optional[FnLimits] = None
    fetch: typing.Sequence[str] = ()
    keep_artifacts: bool = False
    compile_only: bool = False
    container_image: typing.Optional[str] = None
    workspace: typing.Optional[str] = None
    toolkits: typing.Sequence[str] = ()
    gpu: typing.Optional[FnGpu] = None
    env: typing.Mapping[str, BytesLike] = dataclasses.field(default_factory=dict)
    op_id: typing.Optional[str] = None

    def to_wire(self) -> dict:
        """The call as the API takes it, with an op_id."""
        wire: dict = {"op_id": self.op_id or _wire.new_id("fn"), "type": self.type}
        if self.code is not None:
            _wire.put_bytes(wire, "code", self.code)
        files = self.files
        if isinstance(files, typing.Mapping):
            files = [FnFile(path, content) for path, content in files.items()]
        if files:
            wire["files"] = [file.to_wire() for file in files]
        if self.stdin is not None:
            _wire.put_bytes(wire, "stdin", self.stdin)
        if isinstance(self.args, (str, bytes)) or isinstance(self.fetch, (str, bytes)):
            raise errors.InvalidArgumentError(
                "args and fetch are sequences of strings", reason="request.invalid", code="INVALID_ARGUMENT", field="args"
            )
        for key, items in (("args", self.args), ("fetch", self.fetch)):
            if items:
                wire[key] = list(items)
        for key, limits in (("limits", self.limits), ("compile_limits", self.compile_limits)):
            if limits is not None:
                wire[key] = limits.to_wire()
        for key, flag in (("keep_artifacts", self.keep_artifacts), ("compile_only", self.compile_only)):
            if flag:
                wire[key] = True
        if self.container_image is not None:
            wire["environment"] = {"base": self.container_image, "toolkits": list(self.toolkits)}
            if self.workspace is not None:
                wire["environment"]["workspace"] = self.workspace
        if self.gpu is not None:
            wire["gpu"] = dataclasses.asdict(self.gpu)
        _wire.put_env(wire, self.env)
        return wire


@dataclasses.dataclass(frozen=True)
class FnStep:
    """The compile or the run step. Times in seconds; CPU time is that of the whole process tree. ``limit`` names the limit
    that was hit: wall, cpu, memory, output, processes, file or disk."""

    verdict: FnVerdict
    exit_code: typing.Optional[int]
    signal: typing.Optional[int]
    limit: str
    stdout: bytes
    stderr: bytes
    stdout_total: int
    stderr_total: int
    wall_time: float
    cpu_time: float
    memory_peak_bytes: int
    cached: bool


@dataclasses.dataclass
class FnResult:
    """What came of a call.

    Attributes:
        op_id: id of the call.
        verdict: that of the step that decided.
        compile, run: the steps; None when there was none.
        files: what was fetched, by path.
        missing: what was asked for and could not be fetched.
        queue_time: seconds that the call waited for a worker; no part of its limits.
        attempts: workers that took it; more than 1 after faults of the platform.
        existed: answered from an earlier call with this op_id.
        message, reason, retriable: of INFRASTRUCTURE.
        raw: the wire object.
    """

    op_id: str
    verdict: FnVerdict
    compile: typing.Optional[FnStep]
    run: typing.Optional[FnStep]
    files: typing.Dict[str, FnFile]
    missing: typing.List[str]
    queue_time: float
    attempts: int
    existed: bool
    message: str = ""
    reason: str = ""
    retriable: bool = False
    raw: dict = dataclasses.field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """True for exit code 0 within all limits."""
        return self.verdict is FnVerdict.OK

    @property
    def infrastructure(self) -> bool:
        """True for a fault of the platform: run the call again, do not score it."""
        return self.verdict is FnVerdict.INFRASTRUCTURE

    @property
    def step(self) -> typing.Optional[FnStep]:
        """The step that decided: run, else compile."""
        return self.run or self.compile

    @property
    def exit_code(self) -> typing.Optional[int]:
        """Exit code of that step, or None when it did not exit by itself."""
        return self.step.exit_code if self.step else None

    @property
    def stdout(self) -> bytes:
        """stdout of that step."""
        return self.step.stdout if self.step else b""

    @property
    def stderr(self) -> bytes:
        """stderr of that step."""
        return self.step.stderr if self.step else b""

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text, as ``text``."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> "FnResult":
        """Returns self for OK.

        Raises:
            errors.InfrastructureError: a fault of the platform.
            errors.CallError: any other verdict.
        """
        if self.infrastructure:
            raise errors.InfrastructureError(
                self.message, reason=self.reason or "fn.infrastructure", code="INTERNAL", retriable=self.retriable
            )
        if not self.ok:
            raise errors.CallError(self)
        return self


def _step(wire: typing.Optional[dict]) -> typing.Optional[FnStep]:
    if wire is None:
        return None
    return FnStep(
        verdict=FnVerdict(wire["verdict"]),
        exit_code=wire.get("exit_code"),
        signal=wire.get("signal"),
        limit=wire.get("limit", ""),
        stdout=_wire.get_bytes(wire["stdout"], "data"),
        stderr=_wire.get_bytes(wire["stderr"], "data"),
        stdout_total=int(wire["stdout"]["total"]),
        stderr_total=int(wire["stderr"]["total"]),
        wall_time=int(wire["wall_usec"]) / 1e6,
        cpu_time=int(wire["cpu_usec"]) / 1e6,
        memory_peak_bytes=int(wire["memory_peak_bytes"]),
        cached=bool(wire.get("cached", False)),
    )


def result_from_wire(wire: dict) -> FnResult:
    """Makes the result of a wire ``fn_result`` object."""
    files = {}
    for record in wire["files"]:
        files[record["path"]] = FnFile(
            record["path"], _wire.get_bytes(record, "content"), record.get("artifact"), int(record["mode"], 8)
        )
    return FnResult(
        op_id=wire["op_id"],
        verdict=FnVerdict(wire["verdict"]),
        compile=_step(wire.get("compile")),
        run=_step(wire.get("run")),
        files=files,
        missing=list(wire["missing"]),
        queue_time=int(wire["queue_usec"]) / 1e6,
        attempts=int(wire["attempts"]),
        existed=bool(wire["existed"]),
        message=wire.get("message", ""),
        reason=wire.get("reason", ""),
        retriable=bool(wire.get("retriable", False)),
        raw=wire,
    )


# --- Python functions as calls ---

_ARGUMENTS = ".dsec-arguments.json"
_RESULT = ".dsec-result.json"

# Runs in the sandbox, after the function's own source.
_RUNNER = '''
def _dsec_run(function, arguments_file, result_file):
    import json
    import sys
    import traceback
    with open(arguments_file, encoding="utf-8") as file:
        arguments = json.load(file)
    try:
        reply = {"value": function(*arguments["args"], **arguments["kwargs"])}
        text = json.dumps(reply)
    except Exception as error:
        kind = type(error)
        text = json.dumps({"error": {
            "type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
            "message": str(error),
            "traceback": traceback.format_exc(),
        }})
    sys.stdout.flush()
    with open(result_file, "w", encoding="utf-8") as file:
        file.write(text)
'''


def _invalid(message: str, field: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(message, reason="request.invalid", code="INVALID_ARGUMENT", field=field)


def _source_of(function: typing.Callable) -> str:
    """The function's own source without its decorators, after imports of the modules that it uses by name."""
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise _invalid(f"{function!r} is not a function made by def", "function")
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise _invalid(f"{function.__qualname__}: its source cannot be found: {error}", "function") from error
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef):
        raise _invalid(f"{function.__qualname__} must be a plain def (no async def)", "function")
    node.decorator_list = []
    used = inspect.getclosurevars(function)
    if used.nonlocals:
        raise _invalid(f"{function.__qualname__} uses {', '.join(sorted(used.nonlocals))} of an outer function", "function")
    imports = []
    for name, value in sorted(used.globals.items()):
        if isinstance(value, _types.ModuleType):
            imports.append(f"import {value.__name__} as {name}")
        elif not (inspect.isfunction(value) and value.__name__ == function.__name__):
            raise _invalid(f"{function.__qualname__} uses {name} of its module; give it as an argument, or in setup", "function")
    return "\n".join(["from __future__ import annotations", *imports, ast.unparse(node)])


class RemoteFunction:
    """A Python function whose source travels: arguments and result are JSON (tuples become lists). Made by
    :func:`libdsec.function` or ``DSecClient.function``.

    Modules that the function uses by name are imported there as well; other names of its module it must get as arguments,
    or from ``setup``. What it raises is raised again as :class:`libdsec.errors.FunctionError`, and as the builtin exception
    that it was.
    """

    def __init__(self, function: typing.Callable, *, setup: str = "", **options: typing.Any):
        functools.update_wrapper(self, function)
        self.local = function
        source = _source_of(function)
        future, source = source.split("\n", 1)
        self._code = "\n".join(
            [future, setup, source, _RUNNER, f"_dsec_run({function.__name__}, {_ARGUMENTS!r}, {_RESULT!r})", ""]
        )
        self._options = {"type": "python", **options}

    def call_args(self, *args: typing.Any, **kwargs: typing.Any) -> DSecFnCallArgs:
        """The call with these arguments, for ``call_many``.

        Raises:
            errors.InvalidArgumentError: an argument is not JSON.
        """
        try:
            arguments = json.dumps({"args": args, "kwargs": kwargs})
        except (TypeError, ValueError) as error:
            raise _invalid(f"an argument of {self.local.__qualname__} is not JSON: {error}", "args") from error
        options = dict(self._options)
        files = options.pop("files", {})
        if isinstance(files, typing.Mapping):
            files = [FnFile(path, content) for path, content in files.items()]
        fetch = list(options.pop("fetch", ()))
        return DSecFnCallArgs(
            code=self._code, files=[*files, FnFile(_ARGUMENTS, arguments)], fetch=[*fetch, _RESULT], **options
        )

    def value(self, result: FnResult) -> typing.Any:
        """What the function returned.

        Raises:
            errors.FunctionError: what it raised.
            errors.CallError: it did not come to an end: a limit, a signal, an exit of its own.
            errors.InfrastructureError: a fault of the platform.
        """
        reply = result.files.get(_RESULT)
        if reply is None or not result.ok:
            result.check()
            raise errors.CallError(result)
        try:
            wire = json.loads(_encode(reply.content))
            error = wire.get("error")
            if error is None:
                return wire["value"]
            kind, message, trace = str(error["type"]), str(error["message"]), str(error["traceback"])
        except (ValueError, KeyError, TypeError, AttributeError) as broken:
            raise errors.CallError(result) from broken  # the function has written over it
        raise _function_error(kind, message, trace, result)


def _function_error(kind: str, message: str, trace: str, result: FnResult) -> errors.FunctionError:
    base = getattr(builtins, kind, None)
    if isinstance(base, type) and issubclass(base, Exception):
        try:
            both = type(kind, (errors.FunctionError, base), {"__module__": errors.__name__})
            return both(kind, message, trace, result)
        except TypeError:  # a builtin that is made of more than a message
            pass
    return errors.FunctionError(kind, message, trace, result)


def function(target: typing.Optional[typing.Callable] = None, **options: typing.Any) -> typing.Any:
    """Decorator: a Python function as a call. Options as DSecFnCallArgs (``type`` defaults to "python"), and ``setup``:
    source that stands before the function. Called directly it runs here; see :class:`RemoteFunction`."""

    def decorate(inner: typing.Callable) -> RemoteFunction:
        return LocalFunction(inner, **options)

    return decorate(target) if target is not None else decorate


class LocalFunction(RemoteFunction):
    """A RemoteFunction that no client was bound to."""

    def __call__(self, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        return self.local(*args, **kwargs)
