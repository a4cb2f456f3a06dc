# SPDX-License-Identifier: Apache-2.0
"""Acceptance cases: what code inside can see and do (security, network, images)."""

import hashlib
import os
import pathlib
import subprocess
import time

import pytest

import support
from libdsec import DSecContainerRunArgs, Exited, SpawnError, errors
from support import DSEC, args, sandbox


def run(box, code, **options):
    """Runs Python code inside as root; returns stdout."""
    return box.exec(["python3", "-c", code], **options)


def test_case_102_no_network_means_none(shared):
    code = """
import socket, errno, time
def attempt(name, call):
    t = time.monotonic()
    try:
        call(); print(name, 'WORKED')
    except OSError as e:
        print(name, errno.errorcode.get(e.errno, e.errno), 'slow' if time.monotonic() - t > 1 else 'fast')
def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))
def tcp():
    s = socket.socket(); s.settimeout(3); s.connect(('1.1.1.1', 80))
def v6():
    s = socket.socket(socket.AF_INET6); s.settimeout(3); s.connect(('fe80::1', 80, 0, 2))
def vsock(): socket.socket(40, socket.SOCK_STREAM)
def raw(): socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
def packet(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
def dns(): socket.getaddrinfo('example.com', 80)
for name, call in list(globals().items()):
    if name in ('udp', 'tcp', 'v6', 'vsock', 'raw', 'packet', 'dns'): attempt(name, call)
s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); socket.create_connection(s.getsockname()); print('loopback ok')
print(sorted(name for _, name in socket.if_nameindex()))
"""
    text = run(shared, code).stdout.decode()
    assert "WORKED" not in text and "slow" not in text and "loopback ok" in text and "['lo']" in text, text


def test_case_116_base_workspace_toolkit_compose(node, layers, tmp_path, client):
    store = tmp_path / "unused"
    del store
    for version in ("1", "2"):
        tree = tmp_path / f"kit{version}"
        (tree / "opt").mkdir(parents=True)
        (tree / "opt" / "kit").write_text(f"v{version}\n")
        (tree / "shared").mkdir()
        (tree / "shared" / "name").write_text("toolkit\n")
        made = subprocess.run([DSEC, "layer", "build", "--layers", str(layers), "--kind", "toolkit", "--name",
                               f"case116:{version}", "--from-dir", str(tree)], capture_output=True)
        assert made.returncode == 0, made.stderr
    work = tmp_path / "work"
    (work / "shared").mkdir(parents=True)
    (work / "shared" / "name").write_text("workspace\n")
    (work / "shared" / "only").write_text("workspace only\n")
    made = subprocess.run([DSEC, "layer", "build", "--layers", str(layers), "--kind", "workspace", "--name", "case116work:1",
                           "--from-dir", str(work)], capture_output=True)
    assert made.returncode == 0, made.stderr
    boxes = [client.run_container(args(workspace="case116work:1", toolkits=[f"case116:{1 + i % 2}"])) for i in range(6)]
    for i, box in enumerate(boxes):
        assert box.run_shell("cat /opt/kit /shared/name /shared/only; test -x /bin/sh").stdout == \
            f"v{1 + i % 2}\ntoolkit\nworkspace only\n".encode()
        box.stop()
    with pytest.raises(errors.InvalidArgumentError):
        client.run_container(args(workspace="case116:1"))


def test_case_117_image_with_nothing_in_it(node, layers, tmp_path, client):
    source = tmp_path / "true.c"
    source.write_text('#include <unistd.h>\nint main(int n, char** v) { (void)v; return write(1, "static\\n", 7) == 7 ? n : 99; }\n')
    tree = tmp_path / "tree"
    tree.mkdir()
    subprocess.run(["clang-19", "-static", "-O1", "-o", str(tree / "prog"), str(source)], check=True)
    subprocess.run([DSEC, "layer", "build", "--layers", str(layers), "--kind", "base", "--name", "scratch:117", "--from-dir",
                    str(tree)], check=True, capture_output=True)
    with sandbox(client, container_image="scratch:117") as box:
        result = box.exec(["/prog"])
        assert result.end == Exited(1) and result.stdout == b"static\n"
        end = box.run_shell("echo hi").end
        assert isinstance(end, SpawnError) and end.errno == 2
        names = {entry.name for entry in box.files.list("/")}
        assert b"prog" in names and not [n for n in names if b"dsec" in n or b"aether" in n]


def test_case_143_no_door_in_cwd_or_descriptors(shared):
    for cwd in [f"/proc/self/fd/{n}" for n in range(3, 31)] + ["/proc/1/root", "/proc/1/cwd"]:
        result = shared.exec(["sh", "-c", "pwd; ls /proc/self/fd"], cwd=cwd)
        assert isinstance(result.end, SpawnError), (cwd, result)
    result = shared.exec(["ls", "/proc/self/fd"])
    assert result.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is ls reading the folder
    script = "for p in /proc/[0-9]*; do ls $p/fd 2>/dev/null | tr '\\n' ' '; done; readlink /proc/1/exe /proc/1/root; head -c1 /proc/1/environ"
    text = shared.run_shell(script).stdout.decode()
    assert "spawner" not in text and "aether" not in text and "dsec" not in text, text


def test_case_144_platform_binaries_cannot_be_changed(shared):
    def digests():
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (support.BUILD / "bin").glob("dsec*") if p.is_file()}

    before = digests()
    code = """
import os
hits = 0
for _ in range(300):
    for pid in os.listdir('/proc'):
        if pid.isdigit():
            for name in ('exe', 'fd/3', 'fd/4', 'root/proc/self/exe', 'map_files'):
                try:
                    fd = os.open(f'/proc/{pid}/{name}', os.O_WRONLY); hits += 1
                except OSError: pass
print(hits)
"""
    shared.files.write("/tmp/self", b"#!/proc/self/exe\n", mode=0o755)
    attack = shared.start(["python3", "-c", code])
    for _ in range(50):
        shared.exec(["/tmp/self"])
        shared.exec(["true"])
    assert attack.wait().stdout.strip().isdigit()
    assert digests() == before


WRITES = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/modprobe", "/sys/kernel/uevent_helper",
          "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic", "/proc/1/oom_score_adj", "/proc/sys/fs/file-max",
          "/sys/fs/cgroup/memory.max", "/proc/irq/0/smp_affinity"]
HIDDEN = ["kcore", "keys", "latency_stats", "timer_list", "sched_debug", "kpagecgroup", "kpagecount", "kpageflags",
          "pagetypeinfo", "slabinfo", "vmallocinfo", "kallsyms", "iomem", "key-users", "config.gz", "kmsg", "interrupts",
          "modules", "zoneinfo", "diskstats", "partitions", "cmdline", "vmstat", "buddyinfo", "ioports", "swaps"]


def test_case_145_dangerous_files(shared):
    for path in WRITES:
        result = shared.run_shell(f"echo 1 > {path}")
        assert not result.ok, path
    for name in HIDDEN:
        result = shared.run_shell(f"head -c 64 /proc/{name} 2>/dev/null | wc -c")
        assert result.stdout.strip() == b"0", name
    for folder in ("acpi", "asound", "scsi", "sysvipc", "pressure", "driver"):
        assert shared.run_shell(f"ls -A /proc/{folder} 2>/dev/null | wc -l").stdout.strip() == b"0", folder


CALLS = """
import ctypes, os, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    print(name, errno.errorcode.get(ctypes.get_errno(), 0) if result == -1 else 'WORKED')
buf = ctypes.create_string_buffer(4096)
call('mount', 165, b'none', b'/tmp', b'tmpfs', 0, 0)
call('umount2', 166, b'/proc', 2)
call('pivot_root', 155, b'/', b'/')
call('unshare_user', 272, 0x10000000)
call('unshare_mount', 272, 0x20000)
call('setns', 308, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0)
call('clone_user', 56, 0x10000000 | 17, 0, 0, 0, 0)
call('clone3', 435, buf, 88)
call('bpf', 321, 0, buf, 128)
call('perf_event_open', 298, buf, 0, -1, -1, 0)
call('add_key', 248, b'user', b'x', b'y', 1, -3)
call('keyctl', 250, 0, -3, 0, 0, 0)
call('request_key', 249, b'user', b'x', 0, 0)
call('kexec_load', 246, 0, 0, 0, 0)
call('reboot', 169, 0xfee1dead, 672274793, 0x1234567, 0)
call('init_module', 175, buf, 10, b'')
call('finit_module', 313, 0, b'', 0)
call('open_by_handle_at', 304, -100, buf, 0)
call('io_uring_setup', 425, 8, buf)
call('userfaultfd', 323, 0)
call('swapon', 167, b'/tmp/x', 0)
call('fsopen', 430, b'tmpfs', 0)
call('move_mount', 429, -100, b'/', -100, b'/tmp', 0)
call('open_tree', 428, -100, b'/', 1)
call('mount_setattr', 442, -100, b'/', 0, buf, 32)
call('quotactl', 179, 0, b'/', 0, buf)
call('acct', 163, b'/tmp/acct')
call('settimeofday', 164, buf, 0)
call('clock_settime', 227, 0, buf)
call('sethostname', 170, b'x', 1)
call('iopl', 172, 3)
call('syslog', 103, 3, buf, 100)
call('vsock', 41, 40, 1, 0)
call('personality', 135, 0x0400000)
fd = os.open('/tmp/ioctl-probe', os.O_RDWR | os.O_CREAT)
for name, number in (('XFS_IOC_SWAPEXT', 0xc0c0586d), ('FS_IOC_SETFLAGS', 0x40086602), ('FS_IOC_FSSETXATTR', 0x401c5820),
                     ('FIFREEZE', 0xc0045877), ('EXT4_IOC_MOVE_EXT', 0xc028660f), ('BTRFS_SUBVOL_CREATE', 0x5000940e),
                     ('SETFLAGS_high_half', 0x100000000 | 0x40086602)):
    call(name, 16, fd, ctypes.c_ulong(number), buf)
call('TIOCSTI', 16, 0, 0x5412, b'x')
"""


def test_case_145_dangerous_calls(client):
    with sandbox(client) as box:
        text = run(box, CALLS).stdout.decode()
        lines = dict(line.split() for line in text.splitlines())
        assert len(lines) == 42, text
        bad = {name: result for name, result in lines.items() if result not in ("EPERM", "ENOSYS", "EACCES", "EROFS")}
        allowed = {"vsock": ("EPERM", "EAFNOSUPPORT"), "TIOCSTI": ("EPERM",)}
        bad = {name: result for name, result in bad.items() if result not in allowed.get(name, ())}
        assert not bad, bad
        assert box.run_shell("echo fine").stdout == b"fine\n"


def test_case_146_search_of_the_whole_tree(client):
    import concurrent.futures

    boxes = [client.run_container(args()) for _ in range(3)]
    try:
        for box in boxes:
            box.run_shell("mkfifo /tmp/fifo")
        script = "grep -rIs --devices=skip --exclude-dir=usr dsec-needle /; find /proc /sys /dev -type f -exec head -c1 {} + >/dev/null 2>&1; echo done"
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            ends = list(pool.map(lambda b: b.run_shell(script, timeout=60), boxes))
        assert all(r.end in (Exited(0),) or r.end.__class__.__name__ == "Timeout" for r in ends)
        assert all(box.run_shell("echo ok").stdout == b"ok\n" for box in boxes)
    finally:
        for box in boxes:
            box.stop()


def test_case_147_no_platform_socket_is_reachable(node, shared):
    code = """
import os, socket
found = []
for root, folders, files in os.walk('/'):
    if root.startswith('/proc'): folders[:] = []; continue
    for name in files:
        path = os.path.join(root, name)
        try:
            if os.stat(path).st_mode & 0o170000 == 0o140000: found.append(path)
        except OSError: pass
print(found, [l.split()[-1] for l in open('/proc/net/unix').read().splitlines()[1:]])
"""
    text = run(shared, code).stdout.decode()
    assert "dsec" not in text and ".sock" not in text.replace("/tmp/sock", ""), text


def test_case_148_data_routes_need_the_key(node, shared):
    import http.client

    connection = http.client.HTTPConnection(node.url.split("//")[1], timeout=10)
    for method, path in (("POST", "exec"), ("GET", "files?path=/etc/passwd"), ("PUT", "files?path=/x"), ("GET", "archive?path=/"),
                         ("GET", "stats"), ("GET", "events"), ("POST", "renew"), ("GET", "sessions")):
        connection.request(method, f"/v1/sandboxes/{shared.id}/{path}", headers={"Authorization": "Bearer nope"})
        response = connection.getresponse()
        response.read()
        assert response.status == 401, path
    connection.close()
    key = node.key
    text = shared.run_shell("env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'").stdout.decode("utf-8", "replace")
    assert key not in text and key not in node.log.read_text(errors="replace")


def test_case_150_no_leak_of_neighbours_or_lower_layers(node, client):
    with sandbox(client) as first, sandbox(client) as second:
        first.files.write("/root/canary", b"dsec-canary-150")
        script = "grep -rIsl --devices=skip --exclude-dir=proc --exclude-dir=usr dsec-canary-150 / ; cat /proc/self/mountinfo; ls /dev; cat /proc/swaps"
        text = second.run_shell(script).stdout.decode()
        assert "canary" not in text
        assert str(node.folder) not in text and "loop" not in text and "vda" not in text, text


def test_case_150_deleted_lower_file_is_unreachable(node, layers, tmp_path, client):
    tree = tmp_path / "tree"
    (tree / "keep").mkdir(parents=True)
    (tree / "keep" / "x").write_text("x")
    subprocess.run([DSEC, "layer", "build", "--layers", str(layers), "--kind", "workspace", "--name", "case150:1", "--from-dir",
                    str(tree)], check=True, capture_output=True)
    with sandbox(client, workspace="case150:1") as box:
        box.run_shell("rm -r /keep")
        assert not box.files.exists("/keep/x")
        assert b"keep" not in box.run_shell("ls /").stdout


def test_case_151_root_inside_is_nobody_outside(node, shared):
    process = shared.start(["sleep", "77"])
    pids = [p for p in os.listdir("/proc") if p.isdigit() and _cmdline(p) == b"sleep\x0077\x00"]
    assert pids
    status = pathlib.Path(f"/proc/{pids[0]}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert int(fields["Uid"].split()[0]) >= 65536 and fields["Seccomp"].strip() == "2"
    assert int(fields["CapBnd"], 16) & (1 << 21) == 0  # CAP_SYS_ADMIN
    process.cancel()
    shared.run_shell("cp /bin/true /tmp/su; chmod 4755 /tmp/su; touch /tmp/f")
    assert shared.files.stat("/tmp/su").uid == 0
    for folder in (node.state, node.run):
        for path in folder.rglob("su"):
            assert path.stat().st_uid >= 65536


def _cmdline(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_setuid_programs_work_inside(shared):
    shared.run_shell("cp /usr/bin/id /tmp/suid; chmod 4755 /tmp/suid")
    assert b"euid=0" in shared.exec(["/tmp/suid"], user="1000").stdout


def test_platform_processes_are_invisible_and_untouchable(shared):
    text = shared.run_shell("cat /proc/*/comm; kill -9 1; kill -9 -1; echo survived").stdout.decode()
    assert "aether" not in text and "dsec" not in text
    assert shared.run_shell("echo ok").stdout == b"ok\n"


def test_identity_files(shared):
    result = shared.run_shell("hostname; cat /etc/hostname; grep -c localhost /etc/hosts; cat /etc/resolv.conf | wc -c; id -u; ls -ld /tmp")
    lines = result.stdout.decode().splitlines()
    assert lines[0] == lines[1] != "" and int(lines[2]) >= 1 and lines[4] == "0" and lines[5].startswith("drwxrwxrwt")


def test_debian_tools_work_inside(client):
    with sandbox(client) as box:
        script = ("set -e; cd /tmp; useradd -m tester 2>/dev/null || adduser --disabled-password --gecos '' tester; su tester -c 'id -un';"
                  "tar cf x.tar /etc/passwd 2>/dev/null; tar tf x.tar; dpkg -l | wc -l; mkdir a; ln a/../x.tar y; rm -r a")
        result = box.run_shell(script)
        assert result.ok and b"tester" in result.stdout, result
