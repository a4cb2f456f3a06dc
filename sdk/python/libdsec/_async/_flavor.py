# SPDX-License-Identifier: Apache-2.0
"""What differs between the asynchronous and the synchronous library beyond the keywords."""

import asyncio

import httpcore

try:
    from httpcore import AnyIOBackend as NetworkBackend
except ImportError:  # before httpcore 0.17
    from httpcore.backends.auto import AutoBackend as NetworkBackend

# What interrupts a call from outside: the command is then cancelled before the exception goes on.
INTERRUPTS = (asyncio.CancelledError, KeyboardInterrupt)
ConnectionPool = httpcore.AsyncConnectionPool


async def sleep(seconds: float) -> None:
    """Waits without blocking the event loop."""
    await asyncio.sleep(seconds)


async def finish(awaitable, seconds: float) -> None:
    """Runs a clean-up call to its end even while this task is being cancelled, at most ``seconds``; errors are dropped
    because the interruption itself is what the caller must see."""
    task = asyncio.ensure_future(awaitable())
    try:
        await asyncio.wait_for(asyncio.shield(task), seconds)
    except Exception:  # noqa: BLE001
        task.cancel()
