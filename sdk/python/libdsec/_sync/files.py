# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_sync.py from libdsec/_async; change that instead.
"""Files of a sandbox. Paths are those that code inside sees; bytes where names are not UTF-8."""

from __future__ import annotations

import os
import typing

from libdsec import _archive, _wire, errors, types
from libdsec._sync.transport import Transport

PathLike = typing.Union[str, bytes, "os.PathLike[str]"]


def _path(path: PathLike) -> bytes:
    return os.fsencode(path)


class Files:
    """``sandbox.files``. Every call resolves inside the sandbox's root, whatever links lie there.

    Common errors: NotFoundError ``file.not_found``, PermissionDeniedError, InvalidArgumentError ``file.not_regular`` for a
    FIFO, socket or device, TooLargeError ``file.too_large``, SandboxEndedError.
    """

    def __init__(self, transport: Transport, sandbox_id: str):
        self._transport = transport
        self._base = f"/v1/sandboxes/{_wire.segment(sandbox_id)}"

    def read(self, path: PathLike, *, offset: int = 0, length: typing.Optional[int] = None,
                   max_bytes: typing.Optional[int] = None) -> bytes:
        """Returns the bytes of a regular file, or of a range of it.

        Args:
            offset: first byte; negative counts from the end.
            length: number of bytes; None = to the end.
            max_bytes: refuse (TooLargeError) before any transfer when the file is larger.
        """
        headers = {}
        if offset < 0:
            headers["Range"] = f"bytes={offset}"
        elif offset or length is not None:
            if length == 0:
                return b""
            headers["Range"] = f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))
        url = f"{self._base}/files" + _wire.query(path=_path(path), max_bytes=max_bytes)
        try:
            response = self._transport.call("GET", url, headers=headers, timeout=None)
        except errors.DSecError as error:
            if error.http_status == 416:
                return b""
            raise
        data = response.content
        return data if length is None or offset >= 0 else data[:length]

    def read_text(self, path: PathLike, encoding: str = "utf-8") -> str:
        """Returns a file as text; raises UnicodeDecodeError when it is not."""
        return (self.read(path)).decode(encoding)

    def write(self, path: PathLike, data: types.BytesLike, *, mode: typing.Optional[int] = None,
                    user: typing.Optional[str] = None, parents: bool = True) -> types.FileInfo:
        """Replaces a file at once: a reader inside sees the old or the new content, never a mixture.

        Args:
            mode: permission bits, for example 0o755. An existing file keeps its mode and owner unless given.
            user: owner of a new file and of new parents; default: the sandbox's user.
            parents: make missing parent folders.
        """
        url = f"{self._base}/files" + _wire.query(
            path=_path(path), mode=None if mode is None else f"0{mode:o}", user=user, parents=parents
        )
        response = self._transport.call(
            "PUT", url, content=types._encode(data), headers={"Content-Type": "application/octet-stream"}, timeout=None
        )
        return _wire.file_info(response.json())

    def stat(self, path: PathLike, *, follow: bool = True) -> types.FileInfo:
        """Returns what a path is."""
        response = self._transport.call(
            "GET", f"{self._base}/files/stat" + _wire.query(path=_path(path), follow=follow)
        )
        return _wire.file_info(response.json())

    def exists(self, path: PathLike) -> bool:
        """True when the path exists."""
        try:
            self.stat(path)
            return True
        except errors.NotFoundError as error:
            if error.reason.startswith("sandbox."):
                raise
            return False

    def list(self, path: PathLike, *, page_size: int = 1000) -> typing.Iterator[types.FileInfo]:
        """Yields the entries of a folder in byte order, page by page."""
        after = None
        while True:
            url = f"{self._base}/files/list" + _wire.query(path=_path(path), after=after, page_size=page_size)
            page = (self._transport.call("GET", url)).json()
            for entry in page["entries"]:
                yield _wire.file_info(entry)
            after = _wire.get_bytes(page, "next_after")
            if not after:
                return

    def mkdir(self, path: PathLike, *, mode: int = 0o755, parents: bool = True,
                    user: typing.Optional[str] = None) -> None:
        """Makes a folder; an existing one is left as it is when ``parents``."""
        body: dict = {"mode": f"0{mode:o}", "parents": parents}
        _wire.put_bytes(body, "path", _path(path))
        if user is not None:
            body["user"] = user
        self._transport.call("POST", f"{self._base}/files/mkdir", body=body)

    def move(self, source: PathLike, target: PathLike, *, overwrite: bool = False) -> None:
        """Renames; an existing target is an error unless ``overwrite``."""
        body: dict = {"overwrite": overwrite}
        _wire.put_bytes(body, "from", _path(source))
        _wire.put_bytes(body, "to", _path(target))
        self._transport.call("POST", f"{self._base}/files/move", body=body)

    def remove(self, path: PathLike, *, recursive: bool = False) -> None:
        """Removes a file, a link or a folder (with its content when ``recursive``)."""
        url = f"{self._base}/files" + _wire.query(path=_path(path), recursive=recursive)
        self._transport.call("DELETE", url, timeout=None)

    def chmod(self, path: PathLike, mode: typing.Optional[int] = None, *, user: typing.Optional[str] = None) -> None:
        """Sets permission bits and, when given, the owner."""
        body: dict = {}
        _wire.put_bytes(body, "path", _path(path))
        if mode is not None:
            body["mode"] = f"0{mode:o}"
        if user is not None:
            body["user"] = user
        self._transport.call("POST", f"{self._base}/files/chmod", body=body)

    def watch(self, path: PathLike, *, recursive: bool = False) -> typing.Iterator[types.WatchEvent]:
        """Yields changes below a path until the caller stops."""
        url = f"{self._base}/files/watch" + _wire.query(path=_path(path), recursive=recursive)
        with self._transport.stream("GET", url) as response:
            for record in self._transport.records(response):
                if record["type"] == "error":
                    raise errors.from_body(record["error"], 0)
                yield types.WatchEvent(record["type"], _wire.get_bytes(record, "path"))

    def upload_dir(self, local: PathLike, path: PathLike, *, user: typing.Optional[str] = None) -> dict:
        """Copies a local folder into the sandbox as a tar stream; returns ``{"entries", "bytes"}``. Existing files are
        replaced, others stay. Files that are neither regular, folder nor link raise InvalidArgumentError before anything
        is sent."""
        _archive.check_packable(_path(local))
        url = f"{self._base}/archive" + _wire.query(path=_path(path), user=user)
        with _archive.pack(_path(local)) as file:
            response = self._transport.call(
                "PUT", url, content=_upload(file), headers={"Content-Type": "application/x-tar"}, timeout=None
            )
        return response.json()

    def download_dir(self, path: PathLike, local: PathLike) -> "list[str]":
        """Copies a folder of the sandbox into a local folder. The archive is hostile input: nothing is written outside
        ``local``, no device, FIFO or setuid file is made; returns what was left out, one line each.

        Raises:
            errors.InvalidArgumentError: ``archive.hostile``, the archive tries to write outside.
        """
        url = f"{self._base}/archive" + _wire.query(path=_path(path))
        with _archive.Unpacker(_path(local)) as unpacker:
            with self._transport.stream("GET", url, silence=60.0) as response:
                for data in response.iter_bytes():
                    unpacker.feed(data)
            return unpacker.finish()


def _upload(file: typing.BinaryIO) -> typing.Iterator[bytes]:
    while True:
        data = file.read(1 << 18)
        if not data:
            return
        yield data
