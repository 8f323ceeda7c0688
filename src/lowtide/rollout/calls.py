"""Calls of functions that users write (rewards, judges, tools): sync or async ones, and each within a time.

A function that hangs, as a request to a server may, must not keep a run from stopping. With a time limit a sync
function therefore runs in a daemon thread, which the interpreter does not wait for at its end; without one it is called
as it is. Async functions run together, on one event loop in a thread of its own that lives as long as the run, since
clients of servers belong to the loop that they were made on.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from lowtide.compat.threads import abandon_daemon_pools
from lowtide.users_functions import stopping_nobody

GRACE = 1.0
"""Seconds beyond the time limit in which the event loop has to answer; one that does not is blocked."""


class CallTimedOut(Exception):
    """A call did not end within its time."""


class EventLoop:
    """An event loop in a daemon thread, started when it is first used."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize | None = None

    def gather(self, awaitables: Sequence[Awaitable[Any]], timeout: float | None) -> list[Any]:
        """What each gives, or the exception that it raised: `CallTimedOut` where it did not end within `timeout`.

        Args:
            timeout: seconds for all of them, which run together; None for no limit.
        """
        tasks: list[asyncio.Task] = []
        done = asyncio.run_coroutine_threadsafe(_gather(awaitables, tasks, timeout), self._running())
        try:
            return done.result(None if timeout is None else timeout + GRACE)
        except TimeoutError:
            self._loop = None  # one of them blocks it; the next calls have another
            abandon_daemon_pools()
            return [_result(task) for task in tasks] or [CallTimedOut() for _ in awaitables]

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="lowtide-calls", daemon=True).start()
            self._stop = weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


async def _gather(awaitables: Sequence[Awaitable[Any]], tasks: list[asyncio.Task], timeout: float | None) -> list[Any]:
    tasks.extend(asyncio.ensure_future(_awaited(each)) for each in awaitables)
    await asyncio.wait(tasks, timeout=timeout)
    results = [_result(task) for task in tasks]
    if not all(task.done() for task in tasks):
        abandon_daemon_pools()
    for task in tasks:
        task.cancel()
    return results


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (
        KeyboardInterrupt,
        SystemExit,
        GeneratorExit,
    ) as error:  # these would end the loop's thread, and nobody would hear of it
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _result(task: asyncio.Task) -> Any:
    if not task.done():
        return CallTimedOut()
    if task.cancelled():
        return asyncio.CancelledError("it was cancelled")
    return task.exception() or task.result()


class Caller:
    """Calls functions, each within the same time.

    Args:
        timeout: seconds; None for no limit.
        loop: what async functions run on; by default one of its own.
    """

    def __init__(self, timeout: float | None = None, loop: EventLoop | None = None) -> None:
        self.timeout, self.loop = timeout, loop or EventLoop()

    def within(self, timeout: float) -> Caller:
        """The same with another limit."""
        return Caller(timeout, self.loop)

    def start(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """What a function returns, which for an async one is to be awaited by `finish`.

        Raises:
            CallTimedOut: it did not return within the time.
            Exception: what it raised; a RuntimeError where that is no `Exception`.
        """
        with stopping_nobody():
            return self._started(function, arguments)

    def _started(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        if self.timeout is None:
            return function(**arguments)
        done: Future = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        work = functools.partial(_work, done, device, function, arguments)
        inherited = contextvars.copy_context()
        threading.Thread(target=inherited.run, args=(work,), name="lowtide-call", daemon=True).start()
        try:
            return done.result(self.timeout)
        except TimeoutError:
            if done.done():  # it is the function's own
                raise
        except KeyboardInterrupt:
            abandon_daemon_pools()
            raise
        abandon_daemon_pools()
        raise CallTimedOut

    def finish(self, started: Sequence[Any]) -> list[Any]:
        """The results of calls by what `start` returned: as they are, or awaited together.

        Returns:
            in their order; for an async function that raised, the exception.
        """
        results = list(started)
        waiting = [number for number, each in enumerate(started) if inspect.isawaitable(each)]
        if waiting:
            found = self.loop.gather([started[number] for number in waiting], self.timeout)
            for number, result in zip(waiting, found, strict=True):
                results[number] = result
        return results

    def call(self, function: Callable[..., Any], /, **arguments: Any) -> Any:
        """The result of one function, sync or async.

        Raises:
            CallTimedOut: it did not end within the time.
            Exception: what it raised.
        """
        [result] = self.finish([self.start(function, **arguments)])
        if isinstance(result, BaseException):
            raise result
        return result


def _work(done: Future, device: int | None, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """What the thread of a call does; a GPU is chosen thread by thread."""
    try:
        if device is not None:
            torch.cuda.set_device(device)
        done.set_result(function(**arguments))
    except BaseException as error:
        done.set_exception(error)


def drop_unawaited(started: Sequence[Any]) -> None:
    """Closes coroutines that nobody will await, about which Python would complain."""
    for each in started:
        if inspect.iscoroutine(each):
            each.close()


def name_of(function: Any) -> str:
    """What a function is called in logs and messages; a callable object by its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
