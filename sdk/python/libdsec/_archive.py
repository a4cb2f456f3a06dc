# SPDX-License-Identifier: Apache-2.0
"""Local side of directory transfers: packs a folder into a tar file and unpacks a hostile tar stream safely."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
import typing

from libdsec import errors


def _invalid(message: str, reason: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(message, reason=reason, code="INVALID_ARGUMENT")


def _walk(root: bytes) -> typing.Iterator[bytes]:
    for folder, folders, files in os.walk(root, followlinks=False):
        for name in sorted(folders + files):
            yield os.path.join(folder, name)


def check_packable(root: bytes) -> None:
    """Raises InvalidArgumentError when ``root`` is no folder or holds something that cannot be sent."""
    if not os.path.isdir(root):
        raise _invalid(f"{os.fsdecode(root)} is not a folder", "archive.not_a_folder")
    for path in _walk(root):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise _invalid(f"{os.fsdecode(path)} is neither a file, a folder nor a link", "archive.unpackable")


def pack(root: bytes) -> typing.BinaryIO:
    """Returns an unnamed temporary file, positioned at 0, with the content of ``root`` as a pax tar. Owners are not kept."""
    file = tempfile.TemporaryFile()
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
            for path in _walk(root):
                info = tar.gettarinfo(os.fsdecode(path), arcname=os.fsdecode(os.path.relpath(path, root)))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                if info.isreg():
                    with open(path, "rb") as source:
                        tar.addfile(info, source)
                else:
                    tar.addfile(info)
        file.seek(0)
        return typing.cast(typing.BinaryIO, file)
    except BaseException:
        file.close()
        raise


class Unpacker:
    """Collects a tar stream in an unnamed temporary file, then unpacks it below one folder.

    Names are resolved one component at a time by directory descriptors with O_NOFOLLOW, so that a link from the archive (or
    one that is already there) is never followed. Links are made last.
    """

    def __init__(self, target: bytes):
        self._target = target
        self._file = tempfile.TemporaryFile()

    def __enter__(self) -> "Unpacker":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._file.write(data)

    def finish(self) -> "list[str]":
        """Unpacks; returns one line for each entry that was left out."""
        self._file.seek(0)
        os.makedirs(self._target, exist_ok=True)
        left_out: "list[str]" = []
        links: "list[typing.Tuple[list, bytes]]" = []
        folders: "list[typing.Tuple[list, int]]" = []
        root = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with tarfile.open(fileobj=self._file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
                for entry in tar:
                    parts = _parts(os.fsencode(entry.name))
                    if entry.isdir():
                        os.close(_open_folder(root, parts))
                        folders.append((parts, entry.mode & 0o777))
                    elif entry.isreg() and parts:
                        source = tar.extractfile(entry)
                        assert source is not None
                        _write_file(root, parts, source, entry.mode & 0o777)
                    elif entry.issym() and parts:
                        links.append((parts, os.fsencode(entry.linkname)))
                    elif entry.islnk() and parts:
                        _hard_link(root, _parts(os.fsencode(entry.linkname)), parts)
                    else:
                        left_out.append(f"{entry.name}: not a file, folder or link")
            for parts, target in links:
                folder = _open_folder(root, parts[:-1])
                try:
                    _unlink(folder, parts[-1])
                    os.symlink(target, parts[-1], dir_fd=folder)
                finally:
                    os.close(folder)
            for parts, mode in reversed(folders):
                folder = _open_folder(root, parts)
                try:
                    os.fchmod(folder, mode | stat.S_IRWXU)
                finally:
                    os.close(folder)
        except tarfile.TarError as error:
            raise errors.InfrastructureError(f"damaged archive: {error}", reason="archive.damaged") from error
        finally:
            os.close(root)
        return left_out


def _parts(name: bytes) -> "list[bytes]":
    if name.startswith(b"/"):
        raise _invalid(f"absolute name in archive: {os.fsdecode(name)!r}", "archive.hostile")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise _invalid(f"name with .. in archive: {os.fsdecode(name)!r}", "archive.hostile")
    return parts


def _open_folder(root: int, parts: "list[bytes]") -> int:
    """Opens (and makes) a folder below ``root`` without following any link."""
    current = os.dup(root)
    for part in parts:
        try:
            try:
                os.mkdir(part, 0o755, dir_fd=current)
            except FileExistsError:
                pass
            following = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
        except OSError as error:
            raise _invalid(f"{os.fsdecode(part)!r} in archive passes through a link or file: {error.strerror}",
                           "archive.hostile") from error
        finally:
            os.close(current)
        current = following
    return current


def _unlink(folder: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _invalid(f"{os.fsdecode(name)!r} in archive would replace a folder: {error.strerror}",
                       "archive.hostile") from error


def _write_file(root: int, parts: "list[bytes]", source: typing.IO[bytes], mode: int) -> None:
    folder = _open_folder(root, parts[:-1])
    try:
        _unlink(folder, parts[-1])
        handle = os.open(parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with open(handle, "wb") as target:
            while True:
                data = source.read(1 << 20)
                if not data:
                    break
                target.write(data)
            os.fchmod(target.fileno(), mode)
    finally:
        os.close(folder)


def _hard_link(root: int, source: "list[bytes]", parts: "list[bytes]") -> None:
    if not source:
        raise _invalid("hard link to nothing in archive", "archive.hostile")
    from_folder = _open_folder(root, source[:-1])
    try:
        to_folder = _open_folder(root, parts[:-1])
        try:
            try:
                is_link = stat.S_ISLNK(os.stat(source[-1], dir_fd=from_folder, follow_symlinks=False).st_mode)
            except FileNotFoundError as error:
                raise _invalid(f"hard link to a missing entry: {os.fsdecode(source[-1])!r}", "archive.hostile") from error
            if is_link:
                raise _invalid(f"hard link to a link: {os.fsdecode(source[-1])!r}", "archive.hostile")
            _unlink(to_folder, parts[-1])
            os.link(source[-1], parts[-1], src_dir_fd=from_folder, dst_dir_fd=to_folder, follow_symlinks=False)
        finally:
            os.close(to_folder)
    finally:
        os.close(from_folder)
