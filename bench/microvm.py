# SPDX-License-Identifier: Apache-2.0
"""How long a microVM takes until it is ready for commands, beside the bare machine."""

import importlib.util
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUEST = ROOT / "build" / "guest"


def prepare(build):
    """Kernel and initramfs of the guest, and an initramfs whose init switches the machine off."""
    tool = ROOT / "tools" / "guest" / "build_guest.py"
    subprocess.run(["/usr/bin/python3", tool, "--bin", build / "bin", "--out", GUEST], check=True, stdout=subprocess.DEVNULL)
    spec = importlib.util.spec_from_file_location("build_guest", tool)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    archive = module.Archive()
    archive.add("dev", 0o040755)
    archive.add("dev/console", 0o020600, rdev=(5, 1))
    archive.add("init", 0o100755, (build / "bin" / "dsec-poweroff").read_bytes())
    bare = GUEST / "initrd.bare"
    bare.write_bytes(archive.finish())
    return bare


def bare_seconds(bare, memory_mib, kvm):
    """One boot of the same kernel in the same machine, without disks and without us."""
    command = ["qemu-system-x86_64", "-M", "microvm,acpi=on,rtc=on,pit=off,pic=off", "-accel", "kvm" if kvm else "tcg,tb-size=64",
               "-cpu", "host" if kvm else "max", "-m", str(memory_mib), "-nodefaults", "-no-user-config", "-display", "none",
               "-no-reboot", "-serial", "stdio", "-kernel", GUEST / "vmlinuz", "-initrd", bare, "-append",
               "console=ttyS0 quiet reboot=t panic=-1 random.trust_cpu=on" + ("" if kvm else " tsc_early_khz=2000000")]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=120)
    return time.perf_counter() - started


def bench_microvm(figures, build, layers, runs=5):
    """The two in turn, so that both meet the same machine."""
    import support
    from libdsec import DSecMicroVMRunArgs

    bare = prepare(build)
    args = DSecMicroVMRunArgs(container_image=support.BASE, memory_limit_mb=256, cpu_cores_limit=1, allow_emulation=True)
    folder = tempfile.mkdtemp(prefix="dsec-bench-vm-")
    node = support.Node(folder, layers, "benchvm").start()
    ready, floor, phases = [], [], {}
    try:
        with node.client() as client:
            emulated = None
            for run in range(runs + 1):
                started = time.perf_counter()
                box = client.run_microvm(args)
                seconds = time.perf_counter() - started
                emulated = box.info.get("emulated", False)
                for phase in box.info["phases"]:
                    phases.setdefault(phase["phase"], []).append(phase["micros"] / 1e3)
                box.stop()
                bare_time = bare_seconds(bare, 352, not emulated)
                if run > 0:  # the first one makes templates and mounts
                    ready.append(seconds)
                    floor.append(bare_time)
        figures.add("microvm_ready", statistics.median(ready) * 1e3, "ms", statistics.median(floor) * 1e3, None, emulated=emulated,
                    runs=runs, load=os.getloadavg()[0], worst_ms=max(ready) * 1e3,
                    phases_ms={name: round(statistics.median(values), 1) for name, values in phases.items()})
    finally:
        node.stop()
        node.purge()
        support.remove_tree(folder)
