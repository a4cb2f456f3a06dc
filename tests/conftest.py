# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the suites that drive real daemons."""

import os
import pathlib
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "sdk" / "python"))

import support  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "vm: also run on microVMs (DSEC_TEST_BACKEND=microvm)")


@pytest.fixture(scope="session")
def layers():
    """A layer store with the base `debian:test`."""
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces, mounts and cgroups")
    return support.build_layers(support.BUILD / "test-layers")


@pytest.fixture(scope="session")
def languages(layers):
    """The layer store with the base of FnCall's languages."""
    return support.build_languages(layers)


@pytest.fixture(scope="module")
def node(layers, request):
    """A running node for one test module; afterwards everything of it must be gone."""
    folder = tempfile.mkdtemp(prefix="dsec-test-")
    name = "".join(c for c in request.module.__name__ if c.isalnum())[-20:].lower()
    made = support.Node(folder, layers, name, **getattr(request.module, "NODE_CONFIG", {})).start()
    mounts = pathlib.Path("/proc/self/mountinfo").read_text(encoding="ascii")
    yield made
    try:
        if made.process.poll() is None:
            made.stop()
        purged = made.purge()
        assert purged.returncode == 0, purged.stderr
        assert support.host_things(name) == []
        after = pathlib.Path("/proc/self/mountinfo").read_text(encoding="ascii")
        assert [line for line in after.splitlines() if folder in line] == []
        assert len(after.splitlines()) <= len(mounts.splitlines())
    finally:
        support.remove_tree(folder)


@pytest.fixture()
def client(node):
    """An open client of the module's node."""
    made = node.client()
    yield made
    made.close()


@pytest.fixture()
def box(client):
    """A sandbox with the cases' default limits."""
    with support.sandbox(client) as made:
        yield made


@pytest.fixture(scope="module")
def shared(node):
    """One sandbox for all tests of a module that do not harm it."""
    with node.client() as client:
        with support.sandbox(client, pids_limit=512) as made:
            yield made
