# SPDX-License-Identifier: Apache-2.0
"""The judge suite: programs with known ends. judge.json has one row a program:

    name, type, file     what runs (a file may serve several rows)
    stdin, stdin_b64, args, env, inputs, limits, compile_limits, fetch      what it gets
    verdict, exit, signal, limit                                            how it must end
    stdout, stdout_b64, stdout_bytes, stderr, stderr_has, stderr_lacks, files, missing,
    peak_least, peak_most, wall_most_ms                                     what must be seen
"""

import base64
import json
import pathlib

from libdsec import DSecFnCallArgs, FnFile, FnLimits

FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = json.loads((FOLDER / "judge.json").read_text(encoding="utf-8"))
_UNITS = {"wall_ms": ("wall", 1000), "cpu_ms": ("cpu", 1000), "memory_bytes": ("memory_mb", 1 << 20), "file_bytes": ("file_mb", 1 << 20),
          "disk_bytes": ("disk_mb", 1 << 20)}


# A machine that is busy with other tests must not end a program that is not about time.
_PATIENCE = {"wall_ms": 120_000}


def _limits(wire):
    fields = {}
    for key, value in {**_PATIENCE, **wire}.items():
        name, unit = _UNITS.get(key, (key, 1))
        fields[name] = value / unit if unit > 1 else value
    return FnLimits(**fields)


def call_of(row):
    """The call that a row describes."""
    stdin = base64.b64decode(row["stdin_b64"]) if "stdin_b64" in row else row.get("stdin")
    return DSecFnCallArgs(
        type=row["type"],
        code=(FOLDER / "testdata" / row["file"]).read_bytes(),
        files=[FnFile(path, content) for path, content in row.get("inputs", {}).items()],
        stdin=stdin,
        args=row.get("args", ()),
        env=row.get("env", {}),
        limits=_limits(row.get("limits", {})),
        compile_limits=_limits(row.get("compile_limits", {})),
        fetch=row.get("fetch", ()),
    )


def faults_of(row, result):
    """What of a result is not as the row says; empty when all is."""
    if isinstance(result, Exception):
        return [f"refused: {result}"]
    faults = []

    def expect(what, seen, wanted):
        if seen != wanted:
            faults.append(f"{what}: {str(seen)[:200]!r}, not {str(wanted)[:200]!r}")

    step = result.step
    if result.verdict not in row.get("verdict_any", [row["verdict"]]):
        expect("verdict", f"{result.verdict}", row["verdict"])
        faults.append(f"{result.reason} {result.message}" if step is None else
                      f"exit {step.exit_code} signal {step.signal} limit {step.limit!r} stderr {step.stderr[-300:]!r}")
        return faults
    for key, seen in (("exit", step.exit_code), ("signal", step.signal), ("limit", step.limit)):
        if key in row:
            expect(key, seen, row[key])
    if row["verdict"] == "OK" and "verdict_any" not in row:
        expect("exit", step.exit_code, 0)
    for name in ("stdout", "stderr"):
        seen = getattr(step, name)
        if name in row:
            expect(name, seen, row[name].encode("utf-8"))
        if f"{name}_b64" in row:
            expect(name, seen, base64.b64decode(row[f"{name}_b64"]))
        if f"{name}_bytes" in row:
            expect(f"size of {name}", len(seen), row[f"{name}_bytes"])
        if row.get(f"{name}_has", "").encode() not in seen:
            faults.append(f"{name} has no {row[f'{name}_has']!r}: {seen[-300:]!r}")
        if f"{name}_lacks" in row and row[f"{name}_lacks"].encode() in seen:
            faults.append(f"{name} has {row[f'{name}_lacks']!r}")
    if "files" in row:
        expect("files", {path: file.content.decode() for path, file in result.files.items()}, row["files"])
    if "missing" in row:
        expect("missing", result.missing, row["missing"])
    if not row.get("peak_least", 0) <= step.memory_peak_bytes <= row.get("peak_most", 1 << 60):
        faults.append(f"peak {step.memory_peak_bytes}")
    if step.wall_time * 1000 > row.get("wall_most_ms", 1e12):
        faults.append(f"took {step.wall_time} s")
    return faults
