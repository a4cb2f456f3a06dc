# SPDX-License-Identifier: Apache-2.0
"""The synchronous library is generated from the asynchronous one and is fresh."""

import inspect
import pathlib
import subprocess
import sys

import libdsec
import libdsec.sync

SDK = pathlib.Path(__file__).resolve().parents[1]


def test_sync_is_fresh():
    subprocess.run([sys.executable, str(SDK / "tools" / "make_sync.py"), "--check"], check=True)


def test_sync_has_same_names_and_signatures():
    for name in ("DSecClient", "Sandbox", "Session", "Files", "Process", "Function"):
        for member, function in inspect.getmembers(getattr(libdsec, name), inspect.isfunction):
            twin_name = {"__aenter__": "__enter__", "__aexit__": "__exit__"}.get(member, member)
            twin = getattr(getattr(libdsec.sync, name), twin_name)
            assert list(inspect.signature(function).parameters) == list(inspect.signature(twin).parameters)
            assert not inspect.iscoroutinefunction(twin) and not inspect.isasyncgenfunction(twin)


def test_every_public_callable_is_documented():
    for name in ("DSecClient", "Sandbox", "Session", "Files", "Process", "Function"):
        for member, function in inspect.getmembers(getattr(libdsec, name), inspect.isfunction):
            if not member.startswith("_"):
                assert inspect.getdoc(function), f"{name}.{member}"
