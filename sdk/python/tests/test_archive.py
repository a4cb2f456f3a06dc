# SPDX-License-Identifier: Apache-2.0
"""case 42: a hostile tree on download never writes outside the target."""

import io
import os
import stat
import tarfile

import pytest

from libdsec import _archive, errors


def tar_of(*entries):
    """Entries: (name, type, linkname or content, mode)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, value, mode in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.mode = mode
            if kind == tarfile.REGTYPE:
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
            else:
                info.linkname = value
                tar.addfile(info)
    return buffer.getvalue()


def unpack(data, target):
    with _archive.Unpacker(os.fsencode(target)) as unpacker:
        for start in range(0, len(data), 700):
            unpacker.feed(data[start:start + 700])
        return unpacker.finish()


@pytest.fixture()
def place(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    canary = tmp_path / "canary"
    canary.write_text("alive")
    yield target, canary
    assert canary.read_text() == "alive"
    assert sorted(os.listdir(tmp_path)) == ["canary", "target"]


@pytest.mark.parametrize(
    "entries",
    [
        [("../canary", tarfile.REGTYPE, b"x", 0o644)],
        [("/etc/passwd-dsec-test", tarfile.REGTYPE, b"x", 0o644)],
        [("a/../../canary", tarfile.REGTYPE, b"x", 0o644)],
        [("d", tarfile.DIRTYPE, "", 0o755), ("d/h", tarfile.LNKTYPE, "../canary", 0o644)],
        [("h", tarfile.LNKTYPE, "missing", 0o644)],
    ],
)
def test_case_042_names_that_lead_outside_are_refused(place, entries):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        unpack(tar_of(*entries), place[0])
    assert caught.value.reason == "archive.hostile"


def test_case_042_file_through_an_archived_link_stays_inside(place):
    target, _ = place
    # Links are made last, so the file lands in a real folder and the link would have to replace it.
    with pytest.raises(errors.InvalidArgumentError):
        unpack(tar_of(("l", tarfile.SYMTYPE, "..", 0o777), ("l/canary", tarfile.REGTYPE, b"x", 0o644)), target)
    assert (target / "l" / "canary").read_bytes() == b"x"


def test_case_042_link_already_there_is_not_followed(place):
    target, _ = place
    (target / "l").symlink_to("..")
    with pytest.raises(errors.InvalidArgumentError):
        unpack(tar_of(("l/canary", tarfile.REGTYPE, b"x", 0o644)), target)


def test_case_042_existing_link_is_replaced_not_written_through(place):
    target, canary = place
    (target / "f").symlink_to(canary)
    unpack(tar_of(("f", tarfile.REGTYPE, b"new", 0o644)), target)
    assert not (target / "f").is_symlink() and (target / "f").read_bytes() == b"new"


def test_case_042_devices_and_setuid_are_not_made(place):
    target, _ = place
    left_out = unpack(
        tar_of(("dev", tarfile.CHRTYPE, "", 0o666), ("fifo", tarfile.FIFOTYPE, "", 0o666),
               ("su", tarfile.REGTYPE, b"x", 0o4755)), target)
    assert len(left_out) == 2 and os.listdir(target) == ["su"]
    assert stat.S_IMODE(os.stat(target / "su").st_mode) == 0o755


def test_damaged_archive_is_an_infrastructure_error(place):
    with pytest.raises(errors.InfrastructureError):
        unpack(b"\x01" * 2048, place[0])


def test_pack_and_unpack_keep_names_modes_and_links(tmp_path):
    source = tmp_path / "source"
    (source / "d").mkdir(parents=True)
    odd = os.fsencode(str(source)) + b"/\xff\n -x"
    with open(odd, "wb") as file:
        file.write(b"odd")
    (source / "d" / "run.sh").write_text("#!/bin/sh\n")
    os.chmod(source / "d" / "run.sh", 0o755)
    (source / "link").symlink_to("d/run.sh")
    _archive.check_packable(os.fsencode(str(source)))
    with _archive.pack(os.fsencode(str(source))) as file:
        data = file.read()
    target = tmp_path / "target"
    assert unpack(data, target) == []
    assert (target / "link").readlink().as_posix() == "d/run.sh"
    assert stat.S_IMODE(os.stat(target / "d" / "run.sh").st_mode) == 0o755
    with open(os.fsencode(str(target)) + b"/\xff\n -x", "rb") as file:
        assert file.read() == b"odd"


def test_special_files_are_refused_before_an_upload(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.InvalidArgumentError):
        _archive.check_packable(os.fsencode(str(tmp_path)))
