# SPDX-License-Identifier: Apache-2.0
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

    async def _flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, b""
            await self._stream.write(data, self._timeout)

    async def write(self, buffer: bytes, timeout: typing.Optional[float] = None) -> None:
        self._waiting += buffer
        self._timeout = timeout
        if len(self._waiting) >= _JOIN_BYTES:
            await self._flush()

    async def read(self, max_bytes: int, timeout: typing.Optional[float] = None) -> bytes:
        await self._flush()
        return await self._stream.read(max_bytes, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(self, *words: typing.Any, **options: typing.Any) -> "JoiningStream":
        await self._flush()
        return JoiningStream(await self._stream.start_tls(*words, **options))

    def get_extra_info(self, info: str) -> typing.Any:
        return self._stream.get_extra_info(info)


class JoiningBackend:
    """A network backend of httpcore whose streams join what is written."""

    def __init__(self, backend: typing.Any):
        self._backend = backend

    async def connect_tcp(self, *words: typing.Any, **options: typing.Any) -> JoiningStream:
        return JoiningStream(await self._backend.connect_tcp(*words, **options))

    async def connect_unix_socket(self, *words: typing.Any, **options: typing.Any) -> JoiningStream:
        return JoiningStream(await self._backend.connect_unix_socket(*words, **options))

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)
