# SPDX-License-Identifier: Apache-2.0
"""What the Python suites share: a node of our own, sandboxes on it, and the check that nothing of it stays on the host."""

import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import threading
import time

from libdsec import DSecContainerRunArgs, DSecMicroVMRunArgs
from libdsec.sync import DSecClient

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = pathlib.Path(os.environ.get("DSEC_BUILD", ROOT / "build" / "dev"))
DSEC = BUILD / "bin" / "dsec"
BASE = "debian:test"
MIB = 1 << 20
# On which backend the cases run: container, or microvm for those that bear the mark `vm`.
BACKEND = os.environ.get("DSEC_TEST_BACKEND", "container")


def wait_until(condition, seconds, what):
    """Waits for something that has no event to wait for: looks 50 times a second, fails by name."""
    waiter = threading.Event()
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        waiter.wait(0.02)


def pause(seconds):
    """Lets time pass where the passing of time itself is under test (TTL, "nothing happens for 4 s")."""
    threading.Event().wait(seconds)


def trace_instances(node_id):
    """Names of the instances of tracefs that are a node's. The host need not have it mounted."""
    script = "test -d /sys/kernel/tracing/instances || mount -t tracefs tracefs /sys/kernel/tracing; ls /sys/kernel/tracing/instances"
    listed = subprocess.run(["unshare", "--mount", "--propagation", "private", "sh", "-ec", script], capture_output=True,
                            text=True, timeout=60, check=True)
    return [name for name in listed.stdout.split() if name.startswith(f"dsec-sb-{node_id}-")]


def host_things(node_id):
    """What of this node is on the host: processes, cgroups, recordings. Sorted lines."""
    things = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            exe = os.readlink(f"/proc/{pid}/exe")
            groups = pathlib.Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
        except OSError:
            continue
        if f"dsec-{node_id}/" in groups or f"dsec-{node_id}\n" in groups:
            things.append(f"process in our cgroup: {exe}")
    cgroup_root = pathlib.Path("/sys/fs/cgroup")
    for hierarchy in [cgroup_root, *cgroup_root.iterdir()]:
        top = hierarchy / f"dsec-{node_id}"
        if top.is_dir():
            things += [f"cgroup {child}" for child in top.iterdir() if child.is_dir()]
    things += [f"trace {name}" for name in trace_instances(node_id)]
    return sorted(things)


class Node:
    """One `dsec up` with state of its own below `folder`."""

    def __init__(self, folder, layers, node_id, *, program=DSEC, **config):
        self.folder = pathlib.Path(folder)
        self.program = program
        self.node_id = node_id
        self.layers = layers
        self.config = {"vm_allow_emulation": True, **config} if BACKEND == "microvm" else config
        self.state = self.folder / "state"
        self.run = self.folder / "run"
        self.log = self.folder / "dsec.log"
        self.process = None
        self.url = None

    def start(self, seconds=30, env=None):
        """Starts the daemon and waits for its readiness line."""
        config = self.folder / "node.toml"
        lines = [
            f'node_id = "{self.node_id}"',
            'listen = "127.0.0.1:0"' if self.url is None else f'listen = "{self.url.split("//")[1]}"',
            f'state_dir = "{self.state}"',
            f'run_dir = "{self.run}"',
            f'layers_dir = "{self.layers}"',
        ]
        for key, value in self.config.items():
            lines.append(f"{key} = {json.dumps(value)}")
        config.write_text("\n".join(lines) + "\n", encoding="ascii")
        log = open(self.log, "ab")
        self.process = subprocess.Popen(
            [self.program, "up", "--config", config], stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL,
            env=dict(os.environ, **(env or {})), start_new_session=True,
        )
        log.close()
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        line = self.process.stdout.readline().decode() if ready else ""
        assert "http://" in line, f"no readiness line, got {line!r}; log:\n{self.tail()}"
        self.url = "http://" + line.split("http://")[1].split()[0].rstrip("/")
        return self

    def tail(self, size=4000):
        try:
            return self.log.read_bytes()[-size:].decode("utf-8", "replace")
        except OSError:
            return "(no log)"

    @property
    def key(self):
        return (self.state / "api_key").read_text(encoding="ascii").strip()

    def client(self):
        """An open synchronous client; close it or use it in a with statement."""
        return DSecClient(self.url, self.key).open()

    def kill(self):
        """kill -9 of the daemon alone; sandboxes stay."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def stop(self, seconds=30):
        """Graceful stop; sandboxes stay."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self.process.stdout.close()
        return code

    def cli(self, *words, **options):
        """Runs the CLI against this node."""
        env = dict(os.environ, DSEC_URL=self.url or "", DSEC_API_KEY=self.key)
        options.setdefault("timeout", 60)
        return subprocess.run([DSEC, *words], env=env, capture_output=True, **options)

    def purge(self):
        """`dsec purge`: the host as before."""
        return subprocess.run([DSEC, "purge", "--config", self.folder / "node.toml"], capture_output=True, timeout=120)

    def rss_kib(self):
        """Resident memory of the daemon."""
        for line in pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError("no VmRSS")

    def fds(self):
        """Open descriptors of the daemon."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def threads(self):
        """Threads of the daemon."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def curl(self, method, path, body=None, headers=(), raw=False, seconds=30):
        """One raw HTTP request: (status, headers, body). Body may be dict, str or bytes."""
        import http.client

        connection = http.client.HTTPConnection(self.url.split("//")[1], timeout=seconds)
        fields = {"Authorization": f"Bearer {self.key}", **dict(headers)}
        if isinstance(body, dict):
            body = json.dumps(body)
            fields["Content-Type"] = "application/json"
        if isinstance(body, str):
            body = body.encode("utf-8")
        connection.request(method, path, body=body, headers=fields)
        response = connection.getresponse()
        data = response.read()
        connection.close()
        if not raw and data:
            try:
                data = json.loads(data)
            except ValueError:
                pass
        return response.status, response.headers, data


def args(**overrides):
    """The cases' defaults: 256 MiB, 1 core, 256 pids, 512 MiB disk, 1 MiB output."""
    values = dict(container_image=BASE, memory_limit_mb=256, cpu_cores_limit=1, pids_limit=256, disk_limit_mb=512,
                  output_limit_bytes=MIB)
    values.update(overrides)
    return (DSecMicroVMRunArgs if BACKEND == "microvm" else DSecContainerRunArgs)(**values)


@contextlib.contextmanager
def sandbox(client, **overrides):
    """A sandbox for one test; ended afterwards whatever happened."""
    box = client.run_container(args(**overrides))
    try:
        yield box
    finally:
        box.stop()


def build_layers(store):
    """Builds the base layer of the suites into a layer store, once a build folder."""
    tree = ROOT / "build" / "demo" / "base"
    subprocess.run([ROOT / "tools" / "demo" / "build_base.sh", tree], check=True, stdout=subprocess.DEVNULL)
    listing = subprocess.run([DSEC, "layer", "show", BASE, "--layers", store], capture_output=True)
    if listing.returncode != 0:
        subprocess.run(
            [DSEC, "layer", "build", "--layers", store, "--kind", "base", "--name", BASE, "--from-dir", tree], check=True
        )
    return store


LANGUAGES = "fn-languages:1"


def build_languages(store):
    """Builds the base layer of FnCall's languages into a layer store, once a build folder."""
    tree = ROOT / "build" / "fn" / "languages"
    subprocess.run([ROOT / "tools" / "fn" / "build_languages.sh", tree], check=True, stdout=subprocess.DEVNULL)
    stamp = tree.with_name("languages.stamp").read_text(encoding="ascii")
    built = pathlib.Path(store) / "languages.built"
    listing = subprocess.run([DSEC, "layer", "show", LANGUAGES, "--layers", store], capture_output=True)
    if listing.returncode != 0 or not built.exists() or built.read_text(encoding="ascii") != stamp:
        subprocess.run(
            [DSEC, "layer", "build", "--layers", store, "--kind", "base", "--name", LANGUAGES, "--from-dir", tree], check=True
        )
        built.write_text(stamp, encoding="ascii")
    return store


def remove_tree(path):
    """Removes a test folder."""
    shutil.rmtree(path, ignore_errors=True)
