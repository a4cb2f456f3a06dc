# SPDX-License-Identifier: Apache-2.0
"""Exceptions of libdsec.

Each carries the API's dotted ``reason``; branch on the class or on the reason, never on the message. A command that fails
is not an exception: see :class:`libdsec.ExecResult`. ``infrastructure`` tells a fault of the platform (retry, do not score)
from a fault of the request or the workload.
"""

from __future__ import annotations

import typing


class DSecError(Exception):
    """Base of all errors.

    Attributes:
        reason: dotted reason of the API, for example ``"sandbox.not_found"``.
        code: canonical code, for example ``"NOT_FOUND"``.
        message: text for people.
        field: field of the request that is at fault, or ``""``.
        retriable: the same call may succeed later without any change.
        retry_after: seconds to wait before a retry, or None.
        details: further facts, for example the termination of an ended sandbox.
        http_status: status of the reply, or 0 when there was none.
    """

    infrastructure = False

    def __init__(
        self,
        message: str,
        *,
        reason: str = "client.error",
        code: str = "INTERNAL",
        field: str = "",
        retriable: bool = False,
        retry_after: typing.Optional[float] = None,
        details: typing.Optional[dict] = None,
        http_status: int = 0,
    ):
        super().__init__(f"{reason}: {message}" + (f" (field {field})" if field else ""))
        self.reason = reason
        self.code = code
        self.message = message
        self.field = field
        self.retriable = retriable
        self.retry_after = retry_after
        self.details = details or {}
        self.http_status = http_status


class InvalidArgumentError(DSecError):
    """The request can never succeed as written (400); ``field`` names the culprit."""


class UnauthenticatedError(DSecError):
    """API key missing or wrong (401)."""


class PermissionDeniedError(DSecError):
    """The key may not do this (403), or the sandbox's own permissions forbid it."""


class NotFoundError(DSecError):
    """Never existed, or is not yours (404)."""


class ConflictError(DSecError):
    """Same key with other content, name in use, or not legal in the present state (409)."""


class SandboxEndedError(DSecError):
    """The sandbox existed and has ended (410). ``termination`` says why, who and when."""

    @property
    def termination(self) -> dict:
        """The terminal record: cause, fault, message, who, at_unix_ms, limit ..."""
        return self.details.get("termination", {})

    @property
    def infrastructure(self) -> bool:  # type: ignore[override]
        """True when the platform, not the workload, ended it."""
        return self.termination.get("fault") == "infrastructure"


class TooLargeError(DSecError):
    """Body or file is over a limit (413)."""


class UnsupportedError(DSecError):
    """The host lacks a mechanism that the request demands (412)."""


class NoCapacityError(DSecError):
    """No capacity now (429); ``retry_after`` says when to ask again."""


class CancelledError(DSecError):
    """The call was cancelled on the server's side (499)."""


class InfrastructureError(DSecError):
    """The platform failed or is away (5xx, connection errors). Never a verdict on the workload."""

    infrastructure = True


class UnavailableError(InfrastructureError):
    """Cannot be reached now; a retry is safe (503, connection refused or cut)."""


class DeadlineExceededError(InfrastructureError):
    """The call did not finish in its time (504, client-side timeout)."""


class CommandError(DSecError):
    """Raised by ``ExecResult.check()`` when a command did not exit with 0. ``result`` holds everything."""

    def __init__(self, result):
        super().__init__(f"command ended as {result.end}", reason="exec.failed", code="FAILED")
        self.result = result


class CallError(DSecError):
    """Raised by ``FnResult.check()`` when a call did not end as OK. ``result`` holds everything."""

    def __init__(self, result, message: str = ""):
        super().__init__(message or f"the call ended as {result.verdict}", reason="fn.failed", code="FAILED")
        self.result = result


class FunctionError(CallError):
    """What a remote Python function raised: ``exception_type`` by name, ``exception_message``, ``remote_traceback``. When it
    was a builtin exception, this is one of it too."""

    def __init__(self, exception_type: str, exception_message: str, remote_traceback: str, result):
        CallError.__init__(self, result, f"{exception_type}: {exception_message}")
        self.exception_type = exception_type
        self.exception_message = exception_message
        self.remote_traceback = remote_traceback


_BY_CODE = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "UNAUTHENTICATED": UnauthenticatedError,
    "PERMISSION_DENIED": PermissionDeniedError,
    "NOT_FOUND": NotFoundError,
    "ALREADY_EXISTS": ConflictError,
    "CONFLICT": ConflictError,
    "GONE": SandboxEndedError,
    "PAYLOAD_TOO_LARGE": TooLargeError,
    "FAILED_PRECONDITION": UnsupportedError,
    "RESOURCE_EXHAUSTED": NoCapacityError,
    "CANCELLED": CancelledError,
    "INTERNAL": InfrastructureError,
    "UNAVAILABLE": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
}


def from_body(body: dict, http_status: int, retry_after: typing.Optional[float] = None) -> DSecError:
    """Makes the exception for the ``error`` object of a reply or of a stream record."""
    code = str(body.get("code", "INTERNAL"))
    kind = _BY_CODE.get(code, InfrastructureError if http_status >= 500 else DSecError)
    return kind(
        str(body.get("message", f"HTTP status {http_status}")),
        reason=str(body.get("reason", "http.status")),
        code=code,
        field=str(body.get("field") or ""),
        retriable=bool(body.get("retriable", False)),
        retry_after=retry_after,
        details=body.get("details") or {},
        http_status=http_status,
    )
