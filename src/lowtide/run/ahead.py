"""Windows of completions that are asked for before they are learned from.

Beside training (`max_staleness` above 0) a thread has a server write them, and rewards them, one after the other. What
touches the policy stays with the thread that trains: it sends the weights before a window is asked for, and scores what
was written once the window's turn has come. The thread draws no random number and reads no weight, so that a run does
not depend on how fast it is.

Without a thread a window is written when it is taken.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lowtide.rollout.rewards.completed import Completed
from lowtide.run.rollouts import Made, RolloutMaker

Place = tuple[int, int]
"""The pass over the rows, and the window in it."""
Work = Callable[[], Made]
T = TypeVar("T")
POLL_SECONDS = 1.0
THREAD = "lowtide-rollouts"


class Hangs(TimeoutError):
    """What rewards the completions of a window does not return."""


@dataclass
class _Asked:
    """A window that was asked for."""

    beside: Future[Work]
    """What the thread did, and what is left to do where it is taken."""
    made: Made | None = None


class BesideTraining:
    """What is done for a window in a thread, while the policy is trained."""

    def __init__(self, maker: RolloutMaker) -> None:
        self.maker = maker
        self._in_thread = replace(maker, tokenizer=copy.deepcopy(maker.tokenizer))  # one serves one thread at a time

    def write(self, rows: Sequence[Mapping[str, Any]], place: Sequence[int], version: int) -> tuple[Made, Completed]:
        """As of `RolloutMaker`.

        Raises:
            ValueError: it is not known how likely a token was to who wrote it.
        """
        made, completed = self._in_thread.write(rows, place, version)
        for number, each in enumerate(made.rollout.completions):
            of_policy = [known for known, own in zip(each.logprobs, each.written, strict=True) if own]
            if not all(map(math.isfinite, of_policy)):
                raise ValueError(
                    f"completion {number} of a window came with log-probabilities that are missing or not finite, by "
                    "which the loss corrects for the older weights that wrote it: see why the server gives none, or "
                    "set max_staleness=0"
                )
        return made, completed

    def reward(self, written: tuple[Made, Completed], state: Any) -> Work:
        """Rewards what was written, by functions; returns what is left, which is to reward by models.

        Args:
            state: of the trainer when the window was asked for.
        """
        if getattr(self.maker.rewards, "reward_models", ()):
            return functools.partial(self._rewarded_here, *written, state)
        self._in_thread.reward(*written, state)
        return lambda: written[0]

    def _rewarded_here(self, made: Made, completed: Completed, state: Any) -> Made:
        with self.maker.runner.phases.during("reward"):
            self.maker.reward(made, completed, state)
        return made


class Ahead:
    """The windows that were asked for and are not taken yet.

    Args:
        patience: seconds that a window may be rewarded for in the thread, where nothing else limits that.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.waited = 0.0
        """Seconds that training waited for the thread, since they were read last."""
        self._asked: dict[Place, _Asked] = {}
        self._thread: _Thread | None = None

    def __contains__(self, place: Place) -> bool:
        return place in self._asked

    # -- what the thread that trains calls -----------------------------------------------------------------------

    def put(self, place: Place, made: Made) -> None:
        """A window that was written before, as a checkpoint has it."""
        self._asked[place] = _Asked(Future(), made)

    def later(self, place: Place, work: Work) -> None:
        """A window that is written when it is taken."""
        ready: Future = Future()
        ready.set_result(work)
        self._asked[place] = _Asked(ready)

    def ask(self, place: Place, write: Callable[[], T], reward: Callable[[T], Work]) -> None:
        """A window that the thread writes and then rewards, after those that it was asked for before.

        Args:
            reward: returns what is left to do for the thread that trains.
        """
        self._thread = self._thread or _Thread()
        self._asked[place] = _Asked(self._thread.ask(write, reward))

    def take(self, place: Place) -> Made:
        """A window, which is not kept any more.

        Raises:
            Hangs: as in its docstring.
            Exception: what its writing or rewarding came to.
        """
        return self._done(self._asked.pop(place))

    def settle(self) -> None:
        """Returns when nothing is being written.

        Raises:
            Hangs: as in its docstring.
            Exception: what a window's writing or rewarding came to.
        """
        for each in self._asked.values():
            if each.made is None:
                self._wait(each.beside)
                each.beside.result()

    def kept(self) -> dict[Place, Made | Exception]:
        """All windows, written and rewarded, which stay to be taken; of each that failed, its error."""
        found: dict[Place, Made | Exception] = {}
        for place, each in self._asked.items():
            try:
                found[place] = self._done(each)
            except Exception as error:
                found[place] = error
        return found

    def end(self) -> None:
        """Drops all windows; the thread ends with what it does now, and does nothing after it."""
        self._asked.clear()
        if self._thread is not None:
            self._thread.end()
        self._thread = None

    def _done(self, asked: _Asked) -> Made:
        if asked.made is None:
            self._wait(asked.beside)
            asked.made = asked.beside.result()()
        return asked.made

    def _wait(self, future: Future) -> None:
        began = time.monotonic()
        while not future.done():
            try:
                future.exception(POLL_SECONDS)
            except TimeoutError:
                since = None if self._thread is None else self._thread.rewards_since
                if since is not None and time.monotonic() - since > self.patience:
                    raise Hangs(
                        "the rewards of a window that is written beside training did not come within "
                        f"heartbeat_stale_after_s={self.patience:g} seconds: find what they wait for (reward_timeout "
                        "names the function that does), or raise it"
                    ) from None
        self.waited += time.monotonic() - began


class _Thread:
    """Does what it is asked for, one thing after the other; the interpreter does not wait for it at its end.

    Attributes:
        rewards_since: when it began to reward what it wrote; None while it does not.
    """

    def __init__(self) -> None:
        self.rewards_since: float | None = None
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = False
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def ask(self, write: Callable[[], T], reward: Callable[[T], Work]) -> Future[Work]:
        """What `reward` returns, once it has been written."""
        done: Future = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        work = functools.partial(self._do, done, device, write, reward)
        self._work.put(functools.partial(contextvars.copy_context().run, work))
        return done

    def end(self) -> None:
        """Nothing more is done than what it is in the middle of."""
        self._ended = True
        self._work.put(lambda: None)

    def _run(self) -> None:
        while not self._ended:
            self._work.get()()

    def _do(self, done: Future, device: int | None, write: Callable[[], T], reward: Callable[[T], Any]) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            written = write()
            if self._ended:
                return
            self.rewards_since = time.monotonic()
            try:
                done.set_result(reward(written))
            finally:
                self.rewards_since = None
        except BaseException as error:
            done.set_exception(error)
