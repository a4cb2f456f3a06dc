# SPDX-License-Identifier: Apache-2.0
"""What differs between the asynchronous and the synchronous library beyond the keywords."""

import time

import httpcore

try:
    from httpcore import SyncBackend as NetworkBackend
except ImportError:  # before httpcore 0.17
    from httpcore.backends.sync import SyncBackend as NetworkBackend

# What interrupts a call from outside: the command is then cancelled before the exception goes on.
INTERRUPTS = (KeyboardInterrupt, SystemExit)
ConnectionPool = httpcore.ConnectionPool


def sleep(seconds: float) -> None:
    """Waits."""
    time.sleep(seconds)


def finish(call, seconds: float) -> None:
    """Runs a clean-up call; errors are dropped because the interruption itself is what the caller must see. The call's own
    timeout bounds it."""
    del seconds
    try:
        call()
    except Exception:  # noqa: BLE001
        pass
