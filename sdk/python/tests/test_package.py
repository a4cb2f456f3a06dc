# SPDX-License-Identifier: Apache-2.0
"""The package as pip installs it."""

import pathlib
import shutil
import subprocess
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


def test_pip_installs_every_module(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    # Without the network: httpx comes from Debian's package.
    made = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target",
         target, source], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr

    def modules(root):
        return sorted(path.relative_to(root) for path in root.rglob("*") if path.suffix == ".py" or path.name == "py.typed")

    assert modules(target / "libdsec") == modules(PACKAGE / "libdsec")
    used = subprocess.run(
        [sys.executable, "-c", "import libdsec, libdsec.sync; print(libdsec.__file__); libdsec.sync.DSecClient"],
        cwd="/", env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert used.returncode == 0 and used.stdout.startswith(str(target)), used.stderr
