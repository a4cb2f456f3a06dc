# SPDX-License-Identifier: Apache-2.0
"""libdsec: sandboxes for agents.

    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(container_image="python:3.11", memory_limit_mb=1024, cpu_cores_limit=1)
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("python3 -m pytest -q")
    await sandbox.stop()

The synchronous twin with the same names is ``libdsec.sync``.
"""

from libdsec import errors
from libdsec._async.client import DSecClient, Sandbox, Session
from libdsec._async.files import Files
from libdsec._async.fncall import Function
from libdsec._async.iam import Iam
from libdsec._async.process import Process
from libdsec.errors import DSecError
from libdsec.fncall import DSecFnCallArgs, FnFile, FnGpu, FnLimits, FnResult, FnStep, FnVerdict, function
from libdsec.types import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    End,
    ExecResult,
    Exited,
    FileInfo,
    Killed,
    OomKilled,
    OutputChunk,
    SandboxEnded,
    Signaled,
    SpawnError,
    Timeout,
    WatchEvent,
)

__all__ = [
    "DSecClient", "DSecContainerRunArgs", "DSecError", "DSecFnCallArgs", "DSecMicroVMRunArgs", "End", "ExecResult", "Exited", "FileInfo",
    "Files", "FnFile", "FnGpu", "FnLimits", "FnResult", "FnStep", "FnVerdict", "Function", "Iam", "Killed", "OomKilled",
    "OutputChunk", "Process", "Sandbox", "SandboxEnded", "Session", "Signaled", "SpawnError", "Timeout", "WatchEvent",
    "errors", "function",
]
__version__ = "0.1.0"
