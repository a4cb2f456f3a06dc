# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""Sends a request's head and body together. httpcore writes them one after the other; the first then wakes the server for a
head whose body is still missing, which costs a short command a tenth of its time."""

from __future__ import annotations

import typing

# What is joined at most before it is sent.
_JOIN_BYTES = 1 << 16


class JoiningStream:
    """A network stream of httpcore that keeps what is written until the reply is waited for, or there is much of it."""

    def __init__(self, stream: typing.Any):
        self._stream = stream
        self._waiting = b""
        self._timeout: typing.Optional[float] = None

    def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, b""
            self._stream.write(data, self._timeout)

    def write(self, buffer: bytes, timeout: typing.Optional[float] = None) -> None:
        self._waiting += buffer
        self._timeout = timeout
        if len(self._waiting) >= _JOIN_BYTES:
            self._flush()

    def read(self, max_bytes: int, timeout: typing.Optional[float] = None) -> bytes:
        self._flush()
        return self._stream.read(max_bytes, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(self, *words: typing.Any, **options: typing.Any) -> "JoiningStream":
        self._flush()
        return JoiningStream(self._stream.start_tls(*words, **options))

    def get_extra_info(self, info: str) -> typing.Any:
        return self._stream.get_extra_info(info)


class JoiningBackend:
    """A network backend of httpcore whose streams join what is written."""

    def __init__(self, backend: typing.Any):
        self._backend = backend

    def connect_tcp(self, *words: typing.Any, **options: typing.Any) -> JoiningStream:
        return JoiningStream(self._backend.connect_tcp(*words, **options))

    def connect_unix_socket(self, *words: typing.Any, **options: typing.Any) -> JoiningStream:
        return JoiningStream(self._backend.connect_unix_socket(*words, **options))

    def sleep(self, seconds: float) -> None:
        self._backend.sleep(seconds)
