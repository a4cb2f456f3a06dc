# SPDX-License-Identifier: Apache-2.0
"""What differs between the asynchronous and the synchronous library beyond the keywords."""

import time

import httpx

# What interrupts a call from outside: the command is then cancelled before the exception goes on.
INTERRUPTS = (KeyboardInterrupt, SystemExit)
HttpTransport = httpx.HTTPTransport


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
