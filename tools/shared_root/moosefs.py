#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A MooseFS cluster of one master, one chunkserver and one client on this machine, for tests and the demo.

All of it is the caller's: the processes are children, the network is a namespace of their own (a chunkserver cannot be
reached over a loopback address, so it has a veth pair), files lie below one folder. stop() leaves nothing but that folder; started
there again, the cluster has its files again. Needs root and the Debian packages moosefs-master, moosefs-chunkserver and
moosefs-client.

    moosefs.py run FOLDER -- COMMAND...    runs COMMAND while FOLDER/mnt is mounted
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

ADDRESS = "10.213.7.1"
PORTS = {"MATOML": 9419, "MATOCS": 9420, "MATOCL": 9421}


def _wait(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


class MooseFs:
    """`mnt` is the mount point. The three servers are Popen objects: stop, continue and kill them as a test needs. They run at
    niceness `nice`; left to themselves they take -19, which is no fair neighbour where a benchmark measures others."""

    def __init__(self, folder, nice=-19):
        self.nice = nice
        self.folder = pathlib.Path(folder).resolve()
        self.mnt = self.folder / "mnt"
        self.holder = self.master = self.chunkserver = self.client = None
        self.processes = []  # all that were ever started

    def start(self):
        for name in ("mnt", "meta", "chunks", "cs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not any((self.folder / "meta").glob("metadata.mfs*")):  # else what an earlier cluster has left goes on
            (self.folder / "meta" / "metadata.mfs").write_bytes(b"MFSM NEW")
        (self.folder / "exports.cfg").write_text("* / rw,alldirs,maproot=0:0\n", encoding="ascii")
        (self.folder / "hdd.cfg").write_text(f"{self.folder}/chunks\n", encoding="ascii")
        listen = "".join(f"{name}_LISTEN_HOST = {ADDRESS}\n" for name in PORTS)
        (self.folder / "master.cfg").write_text(
            f"WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {self.folder}/meta\n"
            f"EXPORTS_FILENAME = {self.folder}/exports.cfg\nLOCK_MEMORY = 0\n"
            f"NICE_LEVEL = {self.nice}\n{listen}", encoding="ascii")
        (self.folder / "cs.cfg").write_text(
            f"WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {self.folder}/cs\nHDD_CONF_FILENAME = {self.folder}/hdd.cfg\n"
            f"MASTER_HOST = {ADDRESS}\nBIND_HOST = {ADDRESS}\nCSSERV_LISTEN_HOST = {ADDRESS}\nLOCK_MEMORY = 0\n"
            "HDD_LEAVE_SPACE_DEFAULT = 64MiB\nMASTER_RECONNECTION_DELAY = 1\n"
            f"NICE_LEVEL = {self.nice}\n", encoding="ascii")
        # The namespace lives as long as this process, which says when the network is there.
        script = (f"ip link set lo up && ip link add v0 type veth peer name v1 && ip address add {ADDRESS}/24 dev v0 && "
                  "ip link set v0 up && ip link set v1 up && echo up && exec cat")
        self.holder = subprocess.Popen(["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self.holder.stdout.readline() != b"up\n":
            raise RuntimeError("the network namespace could not be made")
        self.start_master()
        self.start_chunkserver()
        self.mount()
        return self

    def _spawn(self, name, *words):
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(["nsenter", "--target", str(self.holder.pid), "--net", *words],
                                       stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def _listening(self, port):
        wanted = f"{port:04X}"
        table = pathlib.Path(f"/proc/{self.holder.pid}/net/tcp").read_text(encoding="ascii")
        return any(line.split()[1].endswith(":" + wanted) and line.split()[3] == "0A" for line in table.splitlines()[1:])

    def start_master(self):
        self.master = self._spawn("master", "/usr/sbin/mfsmaster", "-f", "-a", "-c", self.folder / "master.cfg", "start")
        _wait(lambda: self._listening(PORTS["MATOCL"]), 30, "the master listens")

    def start_chunkserver(self):
        self.chunkserver = self._spawn("chunkserver", "/usr/sbin/mfschunkserver", "-f", "-c", self.folder / "cs.cfg", "start")
        _wait(lambda: self._listening(9422), 30, "the chunkserver listens")

    def mounted(self):
        table = pathlib.Path("/proc/self/mountinfo").read_text(encoding="ascii")
        return any(line.split()[4] == str(self.mnt) for line in table.splitlines())

    def mount(self, io_timeout=0):
        # How long a read waits for a chunkserver before it gives EIO (mfsmount(8)); 0: for ever.
        options = f"mfstimeout={io_timeout},mfsioretries=1000000,mfsnice={self.nice}"
        self.client = self._spawn("client", "/usr/bin/mfsmount", "-f", "-H", ADDRESS, "-o", options, self.mnt)
        _wait(self.mounted, 30, "the client has mounted")
        # A chunkserver that the master does not know yet gives ENOSPC; one that looks through its chunks has no room yet.
        _wait(lambda: self._writable() and os.statvfs(self.mnt).f_bavail > 0, 60, "a file can be written")

    def _writable(self):
        path = self.mnt / ".probe"
        try:
            path.write_bytes(b"x")
            path.unlink()
            return True
        except OSError:
            return False

    def unmount(self, lazy=True):
        """Takes the mount from its path; with `lazy` what is open stays usable while the client lives."""
        subprocess.run(["umount", *(["-l"] if lazy else []), self.mnt], check=True)

    def remount(self):
        """A new client: nothing of the files is in any cache. The old one lives on while something of it is open."""
        self.unmount()
        self.mount()

    @staticmethod
    def end(process, number=signal.SIGKILL):
        """Ends one of the servers, stopped or not, with the helpers that it has forked."""
        if process is None or process.poll() is not None:
            return
        os.killpg(process.pid, number)
        os.killpg(process.pid, signal.SIGCONT)
        process.wait(30)

    def stop(self):
        # The clients go first: whoever waits for an answer of theirs gets ENOTCONN.
        for process in self.processes:
            if process not in (self.chunkserver, self.master):
                self.end(process)
        while self.mounted():
            subprocess.run(["umount", "-l", self.mnt], check=True)
        self.end(self.chunkserver)
        self.end(self.master, signal.SIGTERM)  # it writes its metadata, and waits for its helpers
        if self.holder is not None:
            self.holder.stdin.close()
            self.holder.wait(10)
            self.holder.stdout.close()


def main():
    if len(sys.argv) < 5 or sys.argv[1] != "run" or sys.argv[3] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    # Ctrl-C ends the command, which is waited for; the cluster ends after it.
    cluster = MooseFs(sys.argv[2])
    try:
        cluster.start()
        command = subprocess.Popen(sys.argv[4:])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda signum, frame: command.send_signal(signum))
        return command.wait()
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
