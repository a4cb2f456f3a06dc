# SPDX-License-Identifier: Apache-2.0
"""microVMs behind the whole platform: `dsec up`, the SDK, the command line. Real machines; emulated where no guest boots under KVM."""

import os
import pathlib
import tempfile

import pytest

from libdsec import DSecMicroVMRunArgs, Exited, errors
import support
from support import BASE, MIB, Node, host_things, wait_until

NODE_CONFIG = {"vm_allow_emulation": True}


def vm_args(**overrides):
    values = dict(container_image=BASE, memory_limit_mb=256, cpu_cores_limit=1, pids_limit=256, disk_limit_mb=512)
    values.update(overrides)
    return DSecMicroVMRunArgs(**values)


@pytest.fixture(scope="module")
def vm(node):
    with node.client() as client:
        box = client.run_microvm(vm_args(labels={"kind": "vm"}))
        yield box
        box.stop()


def test_a_microvm_is_a_sandbox_like_any_other(node, client, vm):
    assert vm.info["backend"] == "microvm" and vm.state == "running"
    result = vm.run_shell("uname -r; id -u; exit 3")
    assert result.end == Exited(3)
    assert result.stdout.startswith(b"6.12.") and not result.stdout.startswith(os.uname().release.encode())
    vm.files.write("/root/a", b"\0\xff" * 70_000)
    assert vm.files.read("/root/a") == b"\0\xff" * 70_000
    session = vm.session("one")
    session.run("cd /usr; x=5")
    assert session.run("echo $PWD $x").stdout == b"/usr 5\n"
    process = vm.start(["cat"], stdin_open=True)
    process.write(b"through the port")
    process.close_stdin()
    assert process.wait().stdout == b"through the port"
    assert [box.id for box in client.list(labels={"kind": "vm"})] == [vm.id]
    stats = vm.stats()
    assert stats["usage"]["memory_bytes"] > 16 * MIB and stats["usage"]["cpu_usec"] > 0


def test_its_kernel_is_its_own_and_the_agent_is_out_of_reach(vm):
    out = vm.run_shell("ls /dev; cat /proc/1/comm; for p in /proc/[0-9]*; do cat $p/comm; done; ls /sys/class 2>&1").stdout.decode()
    assert "vport" not in out and "vda" not in out
    assert "aether" not in out and "dsec-guest" not in out


def test_emulation_is_said(node, client, vm):
    rows = {row["name"]: row for row in client.node()["capabilities"]}
    assert rows["vm.vmm"]["ok"]
    used = rows["vm.acceleration"]["used"]
    assert used in ("kvm", "emulation")
    assert vm.info.get("emulated", False) == (used == "emulation")


def test_the_command_line_runs_one(node):
    done = node.cli("run", BASE, "--backend", "microvm", "--memory", "128m", "--", "sh", "-c", "uname -r; exit 4", timeout=120)
    assert done.returncode == 4, done.stderr
    assert done.stdout.startswith(b"6.12.")
    assert node.cli("ps").stdout.count(b"running") == 1  # the module's own


def test_what_a_microvm_cannot_do_is_refused_by_name(client):
    with pytest.raises(errors.InvalidArgumentError) as caught:
        client.run_microvm(vm_args(toolkits=[f"t:{i}" for i in range(10)]))
    assert caught.value.reason == "vm.too_many_layers"
    with pytest.raises(errors.InvalidArgumentError) as caught:
        client.run_microvm(vm_args(record_first_touch=True))
    assert caught.value.reason == "vm.unsupported"


def test_it_outlives_the_daemon(node, vm):
    process = vm.start(script="echo begun; sleep 4; echo went on")
    assert next(iter(process.stream())).data == b"begun\n"
    op_id = process.op_id
    node.kill()
    node.start()
    with node.client() as client:
        again = client.get(vm.id)
        assert again.state == "running"
        assert again.attach(op_id).wait().stdout == b"begun\nwent on\n"
        assert client.get(vm.id).run_shell("cat /root/a | wc -c").stdout == b"140000\n"


def test_nothing_stays(layers):
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    made = Node(folder, layers, "vmgone", vm_allow_emulation=False).start()
    try:
        with made.client() as client:
            rows = {row["name"]: row for row in wait_until(
                lambda: (lambda rows: rows if all(r["used"] != "unknown" for r in rows) else None)(client.node()["capabilities"]),
                30, "acceleration is known")}
            if rows["vm.acceleration"]["used"] != "kvm":
                with pytest.raises(errors.UnsupportedError) as caught:
                    client.run_microvm(vm_args())
                assert caught.value.reason == "vm.no_acceleration"
            box = client.run_microvm(vm_args(allow_emulation=True))
            folders = list((made.state / "vm").glob("v*"))
            assert len(folders) == 1 and folders[0].stat().st_mode & 0o777 == 0o700
            other = client.run_microvm(vm_args(allow_emulation=True, memory_limit_mb=128))
            box.stop()
            wait_until(lambda: len(list((made.state / "vm").glob("v*"))) == 1, 20, "the folder of the stopped one goes")
        # Purge while one runs and its daemon is dead.
        made.kill()
        purged = made.purge()
        assert purged.returncode == 0, purged.stderr
        assert b"machine folder" in purged.stdout
        assert host_things("vmgone") == []
        assert not (made.state / "vm").exists()
        assert list(pathlib.Path(made.run).glob("v*")) == []
        assert other.id
    finally:
        support.remove_tree(folder)
