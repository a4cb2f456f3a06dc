# SPDX-License-Identifier: Apache-2.0
"""The synchronous twin of libdsec: same names, no ``await``."""

from libdsec import errors
from libdsec._sync.client import DSecClient, Sandbox, Session
from libdsec._sync.files import Files
from libdsec._sync.fncall import Function
from libdsec._sync.iam import Iam
from libdsec._sync.process import Process
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
