# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: files."""

import hashlib
import os
import threading
import time
import unicodedata

import pytest

from libdsec import errors
from support import MIB, sandbox


@pytest.mark.parametrize("size", [0, 1, 18432, 18433, 98304, 131072, MIB + 1, 64 * MIB])
@pytest.mark.vm
def test_case_039_size_ladder(shared, size):
    data = os.urandom(size)
    info = shared.files.write("/tmp/ladder", data)
    assert info.size == size and shared.files.stat("/tmp/ladder").size == size
    inside = shared.run_shell("sha256sum </tmp/ladder").stdout.split()[0].decode()
    assert inside == hashlib.sha256(data).hexdigest()
    assert hashlib.sha256(shared.files.read("/tmp/ladder")).hexdigest() == inside
    shared.files.remove("/tmp/ladder")


NAMES = [b"a b", b"a\nb", b"a\tb", b"-rf", b"\"'", b"$(id)", b"*", unicodedata.normalize("NFC", "\u00e9").encode(),
         unicodedata.normalize("NFD", "\u00e9").encode(), b"x" * 255, b"\xff\xfe", b"..foo"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.vm
def test_case_040_odd_names(shared, name):
    shared.files.mkdir("/tmp/odd")
    path = b"/tmp/odd/" + name
    shared.files.write(path, b"data:" + name)
    assert [entry.name for entry in shared.files.list("/tmp/odd")] == [name]
    assert shared.files.read(path) == b"data:" + name
    assert shared.exec(["cat", path]).stdout == b"data:" + name
    shared.files.remove("/tmp/odd", recursive=True)


@pytest.mark.vm
def test_case_040_too_long_and_parents(shared):
    with pytest.raises(errors.DSecError) as caught:
        shared.files.write(b"/tmp/" + b"x" * 256, b"")
    assert "name" in caught.value.reason or "too_long" in caught.value.reason
    shared.files.mkdir("/tmp/par/a")
    shared.files.write("/tmp/par/a/../b", b"inside")
    assert shared.files.read("/tmp/par/b") == b"inside"
    shared.files.write("/../../../../tmp/par/c", b"still inside")
    assert shared.files.read("/tmp/par/c") == b"still inside" and not os.path.exists("/tmp/par")


@pytest.mark.vm
def test_case_042_hostile_tree_on_download(shared, tmp_path):
    (tmp_path / "canary").write_text("alive")
    shared.run_shell(
        "mkdir -p /tmp/evil/d; cd /tmp/evil; ln -s ../../canary up; ln -s /etc abs; echo x > f; ln f hard; mkfifo fifo;"
        "cp /bin/true su; chmod 4755 su; ln -s d link; echo y > d/inner")
    left_out = shared.download_dir("/tmp/evil", tmp_path / "out")
    assert (tmp_path / "canary").read_text() == "alive"
    assert not os.stat(tmp_path / "out" / "su").st_mode & 0o6000
    assert os.path.islink(tmp_path / "out" / "abs") and (tmp_path / "out" / "d" / "inner").read_text() == "y\n"
    assert not os.path.lexists(tmp_path / "out" / "fifo") or left_out == []


@pytest.mark.vm
def test_case_044_owner_mode_and_parents(shared):
    shared.files.mkdir("/home/u", user="1000")
    shared.files.write("/home/u/a/b/c.sh", "#!/bin/sh\n", mode=0o755, user="1000")
    for path in ("/home/u/a", "/home/u/a/b", "/home/u/a/b/c.sh"):
        assert shared.files.stat(path).uid == 1000, path
    assert shared.files.stat("/home/u/a/b/c.sh").mode == 0o755
    shared.run_shell("echo old > /tmp/owned; chmod 0644 /tmp/owned; chown 7:8 /tmp/owned")
    info = shared.files.write("/tmp/owned", "new")
    assert (info.uid, info.gid, info.mode) == (7, 8, 0o644)
    shared.files.mkdir("/tmp", mode=0o755)
    assert shared.files.stat("/tmp").mode == 0o1777


@pytest.mark.vm
def test_case_044_decimal_mode_is_refused(node, shared):
    status, _, body = node.curl("PUT", f"/v1/sandboxes/{shared.id}/files?path=/tmp/m&mode=755", b"x")
    assert status == 400 and body["error"]["field"] == "mode"


@pytest.mark.vm
def test_case_045_special_files(shared):
    shared.run_shell("mkfifo /tmp/fifo; ln -s /nowhere /tmp/dangling; python3 -c \"import socket; "
                     "s=socket.socket(socket.AF_UNIX); s.bind('/tmp/sock')\"")
    for path, kind in (("/tmp/fifo", "fifo"), ("/tmp/sock", "socket"), ("/dev/zero", "char"), ("/dev/full", "char"),
                       ("/tmp", "dir")):
        assert shared.files.stat(path).type == kind
        started = time.monotonic()
        with pytest.raises(errors.DSecError) as caught:
            shared.files.read(path)
        assert caught.value.reason.startswith("file."), path
        assert time.monotonic() - started < 1
    assert shared.files.stat("/tmp/dangling", follow=False).type == "symlink"
    with pytest.raises(errors.NotFoundError):
        shared.files.read("/tmp/dangling")


def test_case_046_write_is_atomic(shared):
    old, new = b"o" * (10 * MIB), b"n" * (10 * MIB)
    shared.files.write("/tmp/atomic", old)
    reader = shared.start(["python3", "-c", """
import os, sys
while not os.path.exists('/tmp/atomic-stop'):
    data = open('/tmp/atomic', 'rb').read()
    if data.count(data[:1]) != 10 * 1024 * 1024:
        print('mixed', len(data)); sys.exit(1)
"""])
    for i in range(10):
        shared.files.write("/tmp/atomic", new if i % 2 else old)
    shared.files.write("/tmp/atomic-stop", b"")
    result = reader.wait()
    assert result.ok, result.stdout
    names = [entry.name for entry in shared.files.list("/tmp")]
    assert not [name for name in names if b"dsec" in name], names


def test_case_046_client_that_dies_leaves_the_old_file(node, shared):
    import socket

    shared.files.write("/tmp/kept", b"old")
    host, port = node.url.split("//")[1].split(":")
    for _ in range(10):
        connection = socket.create_connection((host, int(port)))
        connection.sendall((f"PUT /v1/sandboxes/{shared.id}/files?path=/tmp/kept HTTP/1.1\r\nHost: x\r\n"
                            f"Authorization: Bearer {node.key}\r\nContent-Length: 10000000\r\n\r\n").encode())
        connection.sendall(b"n" * 2000000)
        connection.close()
    assert shared.files.read("/tmp/kept") == b"old"
    from support import wait_until
    wait_until(lambda: not [e for e in shared.files.list("/tmp") if b"dsec" in e.name], 10, "no temporary file remains")


def test_case_047_mounts_are_seen_alike(shared):
    shared.files.write("/dev/shm/up", b"by api")
    assert shared.run_shell("cat /dev/shm/up").stdout == b"by api"
    shared.run_shell("echo by exec > /dev/shm/down")
    assert shared.files.read("/dev/shm/down") == b"by exec\n"


def test_case_048_large_directories(client):
    with sandbox(client, disk_limit_mb=2048) as box:
        assert box.exec(["python3", "-c", "import os\nos.mkdir('/tmp/many')\n"
                         "for i in range(50000): open(f'/tmp/many/{i:06}', 'w').close()"]).ok
        names = [entry.name for entry in box.files.list("/tmp/many", page_size=1000)]
        assert names == [b"%06d" % i for i in range(50000)]


@pytest.mark.vm
def test_case_048_sparse_files_and_ranges(shared):
    shared.run_shell("truncate -s 10G /tmp/sparse; printf tail >> /tmp/sparse")
    with pytest.raises(errors.TooLargeError):
        shared.files.read("/tmp/sparse", max_bytes=100 * MIB)
    assert shared.files.read("/tmp/sparse", offset=-4) == b"tail"
    assert shared.files.read("/tmp/sparse", offset=(10 << 30) - 1, length=3) == b"\0ta"


@pytest.mark.vm
def test_files_move_remove_chmod_and_errors(shared):
    shared.files.write("/tmp/m1", b"1")
    shared.files.write("/tmp/m2", b"2")
    with pytest.raises(errors.ConflictError):
        shared.files.move("/tmp/m1", "/tmp/m2")
    shared.files.move("/tmp/m1", "/tmp/m2", overwrite=True)
    assert shared.files.read("/tmp/m2") == b"1"
    shared.files.chmod("/tmp/m2", 0o600, user="1000:1000")
    info = shared.files.stat("/tmp/m2")
    assert (info.mode, info.uid) == (0o600, 1000)
    shared.files.mkdir("/tmp/tree/deep")
    with pytest.raises(errors.DSecError):
        shared.files.remove("/tmp/tree")
    shared.files.remove("/tmp/tree", recursive=True)
    with pytest.raises(errors.NotFoundError):
        shared.files.remove("/tmp/tree")


@pytest.mark.vm
def test_files_watch_reports_changes(shared):
    shared.files.mkdir("/tmp/watched")
    seen = []
    ready = threading.Event()

    def follow():
        stream = shared.files.watch("/tmp/watched")
        ready.set()
        for event in stream:
            seen.append((event.type, event.path))
            if event.path.endswith(b"last"):
                return

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    ready.wait()
    end = time.monotonic() + 10
    while follower.is_alive() and time.monotonic() < end:
        shared.run_shell("echo x > /tmp/watched/one; rm /tmp/watched/one; echo y > /tmp/watched/last")
        follower.join(0.2)
    assert not follower.is_alive() and any(kind == "created" for kind, _ in seen), seen


@pytest.mark.vm
def test_directories_travel_both_ways(shared, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    os.chmod(source / "sub" / "run.sh", 0o755)
    (source / "link").symlink_to("sub/run.sh")
    (source / "big").write_bytes(os.urandom(5 * MIB))
    shared.upload_dir(source, "/tmp/sent")
    assert shared.run_shell("/tmp/sent/link").stdout == b"ran\n"
    shared.download_dir("/tmp/sent", tmp_path / "back")
    assert (tmp_path / "back" / "big").read_bytes() == (source / "big").read_bytes()
    assert os.readlink(tmp_path / "back" / "link") == "sub/run.sh"
    assert os.access(tmp_path / "back" / "sub" / "run.sh", os.X_OK)
