# SPDX-License-Identifier: Apache-2.0
"""A cluster of real daemons on this machine: etcd, apiservers, edges, each with folders of its own."""

import json
import os
import pathlib
import select
import signal
import socket
import subprocess

import support
from libdsec.sync import DSecClient


class Etcd:
    """One member of etcd on a Unix socket, started and killed by its own pid."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.process = None
        self.start()

    @property
    def endpoint(self):
        return f"unix:{self.folder}/localhost:0"

    def start(self, seconds=60):
        """Starts it and waits for its own word that it serves (sd_notify)."""
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = self.folder / "notify"
        for name in ("notify", "localhost:0", "localhost:100"):
            (self.folder / name).unlink(missing_ok=True)
        notify.bind(str(path))
        log = open(self.folder / "log", "ab")
        self.process = subprocess.Popen(
            ["etcd", "--name", "m0", "--data-dir", "data", "--listen-client-urls", "unix://localhost:0",
             "--advertise-client-urls", "unix://localhost:0", "--listen-peer-urls", "unix://localhost:100",
             "--initial-advertise-peer-urls", "unix://localhost:100", "--initial-cluster", "m0=unix://localhost:100",
             "--logger", "zap", "--unsafe-no-fsync"],
            cwd=self.folder, env=dict(os.environ, NOTIFY_SOCKET=str(path)), stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )
        log.close()
        ready, _, _ = select.select([notify], [], [], seconds)
        notify.close()
        assert ready, f"etcd (package etcd-server) did not start:\n{(self.folder / 'log').read_text()[-2000:]}"

    def kill(self):
        self.process.kill()
        self.process.wait()


class Daemon:
    """`dsec apiserver` or `dsec edge` with state of its own below `folder`."""

    def __init__(self, command, folder, node_id, **config):
        self.command = command
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.node_id = node_id
        self.config = {"state_dir": str(self.folder / "state"), "run_dir": str(self.folder / "run"), **config}
        self.process = None
        self.line = ""

    def spawn(self, env=None):
        lines = [f'node_id = "{self.node_id}"']
        lines += [f"{key} = {json.dumps(value)}" for key, value in self.config.items()]
        (self.folder / "node.toml").write_text("\n".join(lines) + "\n", encoding="ascii")
        log = open(self.folder / "log", "ab")
        self.process = subprocess.Popen(
            [support.DSEC, self.command, "--config", self.folder / "node.toml"], stdout=subprocess.PIPE, stderr=log,
            stdin=subprocess.DEVNULL, env=dict(os.environ, **(env or {})), start_new_session=True,
        )
        log.close()

    def start(self, seconds=60, env=None):
        self.spawn(env)
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        self.line = self.process.stdout.readline().decode() if ready else ""
        assert " is ready at " in self.line, f"no readiness line, got {self.line!r}; log:\n{self.tail()}"
        return self

    def refused(self, seconds=60):
        """Starts it where it must not start; its last words."""
        self.spawn()
        code = self.process.wait(seconds)
        self.process.stdout.close()
        assert code == 1, self.tail()
        return self.tail()

    def tail(self, size=6000):
        try:
            return (self.folder / "log").read_bytes()[-size:].decode("utf-8", "replace")
        except OSError:
            return "(no log)"

    def alive(self):
        return self.process is not None and self.process.poll() is None

    def kill(self):
        """kill -9 of the daemon alone; sandboxes stay."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def stop(self, seconds=60):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        self.process.stdout.close()
        return code


class Apiserver(Daemon):
    """One apiserver; a second start listens where the first did."""

    def __init__(self, folder, node_id, layers, etcd, ca_dir):
        super().__init__("apiserver", folder, node_id, listen="127.0.0.1:0", cluster_listen="127.0.0.1:0",
                         layers_dir=str(layers), etcd=etcd, ca_dir=str(ca_dir))

    def start(self, seconds=60, env=None):
        super().start(seconds, env)
        words = self.line.split(" is ready at ")[1].split()
        self.url, self.cluster_address = words[0].rstrip("/"), words[2]
        self.config["listen"] = self.url.split("//")[1]
        self.config["cluster_listen"] = self.cluster_address
        return self

    @property
    def key(self):
        return (self.folder / "state" / "api_key").read_text(encoding="ascii").strip()

    def client(self):
        return DSecClient(self.url, self.key).open()

    def cluster(self, *words, check=True):
        """`dsec cluster`, as an operator on the apiserver's machine."""
        done = subprocess.run(
            [support.DSEC, "cluster", "--ca-dir", self.config["ca_dir"], "--apiserver", self.cluster_address, *words],
            capture_output=True, timeout=60, text=True,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def token(self, *words):
        return self.cluster("token", *words).stdout.strip()


class Edge(Daemon):
    """One edge with ids of its own on the host."""

    def __init__(self, folder, node_id, number, layers, apiservers, token="", **config):
        super().__init__("edge", folder, node_id, cluster_listen="127.0.0.1:0", layers_dir=str(layers),
                         apiservers=",".join(apiservers), join_token=token, capacity=64, slot_pool_size=4,
                         id_base=0x60000000 + number * 0x800000, agent_uid_base=0x5fff0000 + number * 256, **config)

    def start(self, seconds=60, env=None):
        super().start(seconds, env)
        self.address = self.line.split(" is ready at ")[1].split()[0]
        self.config["cluster_listen"] = self.address
        return self

    def purge(self):
        return subprocess.run([support.DSEC, "purge", "--config", self.folder / "node.toml"], capture_output=True,
                              timeout=120)

    def epoch(self):
        """(own epoch, the one that is being taken or 0), as its state folder has it."""
        lines = (self.folder / "state" / "epoch").read_text(encoding="ascii").split()
        return int(lines[2]), int(lines[3])
