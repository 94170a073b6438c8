"""Rounds in which each of some workers gives an object and gets everybody's; behind ``api.all_gather``.

The worker whose name comes first keeps the round. The others bring their object by a call that is answered
once the last one has come; who waits there holds no thread. Workers that make the same rounds in the same
order meet: a round is named by its workers and its number among theirs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpirpc._core.agent import Pending
from mpirpc._core.call import Calls
from mpirpc._core.current import get_current
from mpirpc.errors import LocalProtocolError, RpcError, RpcTimeoutError, WorkerLostError
from mpirpc.functions import async_execution


class RoundKey(NamedTuple):
    """Name of a round: the names of its workers, sorted, and its number among the rounds of these."""

    workers: tuple[str, ...]
    number: int


class _Round:
    """One round at the worker that keeps it; ``done`` gets the objects by worker, or why it was given up."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.is_over = False  # whoever sets it, under the lock, finishes ``done``
        self.done: torch.futures.Future[dict[str, Any]] = torch.futures.Future()


class Rounds:
    """The rounds that one worker keeps. Thread: any, for every method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around what follows
        self._open: dict[RoundKey, _Round] = {}  # the first join() adds, the last one removes
        self._lost: set[str] = set()  # workers that are gone; lose() adds

    def join(self, key: RoundKey, worker: str, obj: Any) -> torch.futures.Future[dict[str, Any]]:
        """Bring a worker's object; the future is done when all have come.

        Raises:
            LocalProtocolError: It has come already, or is not one of the round's.
        """
        if worker not in key.workers:
            raise LocalProtocolError(f"{worker!r} came to {_describe(key)} and is none of them")
        with self._lock:
            found = self._open.setdefault(key, _Round())
            if worker in found.objects:
                raise LocalProtocolError(f"{worker!r} came to {_describe(key)} twice")
            found.objects[worker] = obj
            is_complete = len(found.objects) == len(key.workers)
            if is_complete:
                del self._open[key]
            ends_it = is_complete and not found.is_over
            found.is_over = found.is_over or ends_it
            gone = self._lost.difference(found.objects).intersection(key.workers)
        if ends_it:
            found.done.set_result(found.objects)
        elif gone:
            self.give_up(key, _lost(key, gone))
        return found.done

    def lose(self, worker: str) -> None:
        """A worker is gone: give up the rounds that it has not come to, now and later."""
        with self._lock:
            self._lost.add(worker)
            waiting = [
                key
                for key, found in self._open.items()
                if worker in key.workers and worker not in found.objects
            ]
        for key in waiting:
            self.give_up(key, _lost(key, {worker}))

    def give_up(self, key: RoundKey, error: BaseException) -> None:
        """Fail the round for those who have come and those who still will."""
        with self._lock:
            found = self._open.setdefault(key, _Round())
            ends_it = not found.is_over
            found.is_over = True
        if ends_it:
            found.done.set_exception(error)  # type: ignore[arg-type]  # torch says T

    def missing(self, key: RoundKey) -> list[str]:
        """Return who has not come to a round that is open; nobody if it is not kept here."""
        with self._lock:
            found = self._open.get(key)
            return [] if found is None else [worker for worker in key.workers if worker not in found.objects]

    def __len__(self) -> int:
        return len(self._open)


class Gathering:
    """What one worker does in rounds.

    Args:
        calls: Carries objects to the worker that keeps a round.
    """

    def __init__(self, calls: Calls) -> None:
        self.rounds = Rounds()
        self._calls = calls
        self._lock = threading.Lock()  # around _counts
        self._counts: dict[tuple[str, ...], int] = {}  # by workers: rounds begun here

    def all_gather(self, workers: Sequence[str], obj: Any, timeout: float) -> dict[str, Any]:
        """Give ``obj`` and return everybody's, by name. Thread: any. Progress: waits for all of ``workers``.

        Raises:
            RpcTimeoutError: Some had not come in time.
        """
        key = self._next(tuple(sorted(workers)))
        me = self._calls.agent.me
        call = (_join, (key, me.name, obj), dict[str, Any]())
        dest = self._calls.agent.find_worker(key.workers[0]).id
        pending: Pending | None = None
        try:  # the keeper calls itself: what it gets must be its own, others are still being sent theirs
            pending = self._calls.start_call(dest, call, timeout)
            objects: dict[str, Any] = self._calls.wait_result(pending)
        except RpcTimeoutError:
            if pending is not None and pending.error is None:  # another's limit, and all have been told
                raise
            error = self._timeout(key, timeout)
            self._give_up(key, dest, error)
            raise error from None
        except BaseException as error:  # Ctrl-C too: the others would wait for ever, and so would shutdown
            self._give_up(key, dest, RpcError(f"{me} gave up {_describe(key)}: {type(error).__name__}"))
            raise
        return objects

    def _give_up(self, key: RoundKey, keeper: int, error: RpcError) -> None:
        """Fail a round for all of its workers; the keeper is told, nobody waits until it knows."""
        if keeper == self._calls.agent.rank:
            self.rounds.give_up(key, error)
            return
        with contextlib.suppress(RpcError):  # the group may be at its end
            self._calls.start_call(keeper, (_give_up, (key, error), {}), 0)

    def _next(self, workers: tuple[str, ...]) -> RoundKey:
        with self._lock:
            number = self._counts[workers] = self._counts.get(workers, 0) + 1
        return RoundKey(workers, number)

    def _timeout(self, key: RoundKey, timeout: float) -> RpcTimeoutError:
        missing = self.rounds.missing(key)
        who = f"; {', '.join(map(repr, missing))} had not come" if missing else ""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({timeout:g} s): {_describe(key)} timed out{who}",
            "every one of these workers must call it, the same number of times",
            worker=str(self._calls.agent.me),
            timeout=timeout,
        )


def _describe(key: RoundKey) -> str:
    return f"round {key.number} of {', '.join(key.workers)}"


def _lost(key: RoundKey, gone: set[str]) -> WorkerLostError:
    return WorkerLostError(
        f"{_describe(key)} cannot be completed: {', '.join(map(repr, sorted(gone)))} left or died",
        "name the workers that are left",
    )


def _give_up(key: tuple[tuple[str, ...], int], error: RpcError) -> None:
    rounds: Rounds = get_current().gathering.rounds
    rounds.give_up(RoundKey(*key), error)


@async_execution
def _join(key: tuple[tuple[str, ...], int], worker: str, obj: Any) -> torch.futures.Future[dict[str, Any]]:
    rounds: Rounds = get_current().gathering.rounds
    return rounds.join(RoundKey(*key), worker, obj)
