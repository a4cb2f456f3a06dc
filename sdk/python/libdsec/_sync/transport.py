# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""HTTP to one apiserver: authentication, errors, retries."""

from __future__ import annotations

import contextlib
import json
import time
import typing

import httpcore
import httpx

from libdsec import errors
from libdsec._sync import _flavor
from libdsec._sync.network import JoiningBackend

_CONNECT_TIMEOUT = 5.0
# The server sends a keepalive each 5 s of silence; thrice that without a byte means that the connection is dead.
_STREAM_SILENCE = 15.0
# Parsing an address costs as much as all else that is done to a request; few are used again and again.
_MAX_URLS = 512


# What httpcore raises when the peer or the network fails.
_FAILURES = (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol)


class Response:
    """A reply; its body is read with ``read`` or as it comes with ``iter_bytes``."""

    __slots__ = ("status_code", "content", "_raw", "_headers")

    def __init__(self, raw: httpcore.Response):
        self.status_code: int = raw.status
        self.content = b""
        self._raw = raw
        self._headers: typing.Optional[typing.Dict[str, str]] = None

    @property
    def headers(self) -> typing.Dict[str, str]:
        """Names in lower case."""
        if self._headers is None:
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._raw.headers
            }
        return self._headers

    def json(self) -> typing.Any:
        return json.loads(self.content)

    def read(self) -> bytes:
        self.content = b"".join([data for data in self._raw.iter_stream()])
        return self.content

    def iter_bytes(self) -> typing.Iterator[bytes]:
        return self._raw.iter_stream()

    def close(self) -> None:
        self._raw.close()


def _error_of(response: Response, body: bytes) -> errors.DSecError:
    retry_after = None
    try:
        retry_after = float(response.headers.get("retry-after", ""))
    except ValueError:
        pass
    try:
        wire = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        wire = {"message": f"HTTP status {response.status_code}", "reason": "http.status"}
    return errors.from_body(wire, response.status_code, retry_after)


def _connection_error(error: Exception) -> errors.DSecError:
    text = str(error) or type(error).__name__
    if isinstance(error, httpcore.TimeoutException):
        return errors.DeadlineExceededError(
            f"no answer in time: {text}", reason="client.timeout", code="DEADLINE_EXCEEDED", retriable=True
        )
    return errors.UnavailableError(
        f"cannot talk to the apiserver: {text}", reason="client.connection", code="UNAVAILABLE", retriable=True
    )


class Transport:
    """One pool of connections. Safe for concurrent calls."""

    def __init__(self, endpoint: str, api_key: str, max_connections: int):
        self._endpoint = endpoint
        socket_path = None
        base = endpoint
        if endpoint.startswith("unix:"):
            socket_path = endpoint[len("unix:"):]
            base = "http://localhost"
        self._base = base.rstrip("/")
        self._urls: typing.Dict[str, httpcore.URL] = {}
        origin = self._url("")
        self._prefix = [
            (b"Host", httpx.URL(base).netloc),
            (b"Authorization", f"Bearer {api_key}".encode("ascii")),
            (b"User-Agent", b"libdsec/0.1"),
        ]
        # The engine of httpx without its client, whose requests, cookies, redirects and merging of URLs nothing here needs and
        # which would take a third of the time of a short command.
        self._http = _flavor.ConnectionPool(
            ssl_context=httpx.create_ssl_context() if origin.scheme == b"https" else None,
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            uds=socket_path,
            network_backend=JoiningBackend(_flavor.NetworkBackend()),
        )

    def _url(self, path: str) -> httpcore.URL:
        url = self._urls.get(path)
        if url is None:
            if len(self._urls) >= _MAX_URLS:
                self._urls.clear()
            parsed = httpx.URL(self._base + path)
            url = self._urls[path] = httpcore.URL(
                scheme=parsed.raw_scheme, host=parsed.raw_host, port=parsed.port, target=parsed.raw_path
            )
        return url

    def close(self) -> None:
        self._http.close()

    def _send(
        self,
        method: str,
        path: str,
        body: typing.Optional[dict],
        content: typing.Any,
        headers: typing.Optional[dict],
        silence: typing.Optional[float],
    ) -> Response:
        """Sends one request; the reply's body is still to be read and the reply to be closed."""
        sent = list(self._prefix)
        if headers:
            sent.extend((name.encode("ascii"), value.encode("ascii")) for name, value in headers.items())
        if body is not None:
            sent.append((b"Content-Type", b"application/json"))
            content = _json(body)
        if isinstance(content, bytes):
            sent.append((b"Content-Length", b"%d" % len(content)))
        elif content is not None:
            sent.append((b"Transfer-Encoding", b"chunked"))
        elif method not in ("GET", "HEAD"):
            sent.append((b"Content-Length", b"0"))
        request = httpcore.Request(
            method, self._url(path), headers=sent, content=content,
            extensions={"timeout": {"connect": _CONNECT_TIMEOUT, "read": silence, "write": silence, "pool": None}},
        )
        return Response(self._http.handle_request(request))

    def call(
        self,
        method: str,
        path: str,
        *,
        body: typing.Union[dict, typing.Callable[[], dict], None] = None,
        content: typing.Any = None,
        headers: typing.Optional[dict] = None,
        timeout: typing.Optional[float] = 60.0,
        retry_until: typing.Optional[float] = None,
    ) -> Response:
        """One request with its whole reply. With ``retry_until`` (monotonic time) a retriable failure is tried again until
        then; only idempotent requests may ask for that. A body that says how much time is left is made anew for each try."""
        pause = 0.05
        while True:
            try:
                response = self._send(method, path, body() if callable(body) else body, content, headers, timeout)
                try:
                    response.read()
                finally:
                    response.close()
                if response.status_code < 400:
                    return response
                failure = _error_of(response, response.content)
            except _FAILURES as error:
                failure = _connection_error(error)
            left = 0.0 if retry_until is None else retry_until - time.monotonic()
            wait = failure.retry_after or pause
            if not failure.retriable or left <= wait:
                raise failure
            _flavor.sleep(wait)
            pause = min(pause * 2, 2.0)

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        body: typing.Optional[dict] = None,
        content: typing.Any = None,
        headers: typing.Optional[dict] = None,
        silence: typing.Optional[float] = _STREAM_SILENCE,
    ):
        """One request whose reply is read as it comes; connection errors surface as UnavailableError."""
        try:
            response = self._send(method, path, body, content, headers, silence)
            try:
                if response.status_code >= 400:
                    raise _error_of(response, response.read())
                yield response
            finally:
                response.close()
        except _FAILURES as error:
            raise _connection_error(error) from error

    def records(self, response: Response) -> typing.Iterator[dict]:
        """NDJSON records of a streamed reply, keepalives left out."""
        rest = b""
        for data in response.iter_bytes():
            rest += data
            if b"\n" not in data:
                continue
            *lines, rest = rest.split(b"\n")
            for line in lines:
                record = json.loads(line)
                if record.get("type") != "keepalive":
                    yield record


def _json(body: dict) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8")
