"""Rounds in which each of some workers gives an object and gets everybody's; behind ``api.all_gather``.

The worker whose name comes first keeps the round. The others bring their object by a call that is answered
once the last one has come; who waits there holds no thread. Workers that make the same rounds in the same
order meet: a round is named by its workers and its number among theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpirpc._core.call import Calls
from mpirpc._core.current import get_current
from mpirpc.errors import LocalProtocolError, RpcTimeoutError
from mpirpc.functions import async_execution


class RoundKey(NamedTuple):
    """Name of a round: the names of its workers, sorted, and its number among the rounds of these."""

    workers: tuple[str, ...]
    number: int


class _Round:
    """One round at the worker that keeps it; ``done`` gets the objects by worker, or why it was given up."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.done: torch.futures.Future[dict[str, Any]] = torch.futures.Future()


class Rounds:
    """The rounds that one worker keeps. Thread: any, for every method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # around what follows
        self._open: dict[RoundKey, _Round] = {}  # the first join() adds, the last one removes

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
            is_last = len(found.objects) == len(key.workers)
            if is_last:
                del self._open[key]
        if is_last and not found.done.done():
            found.done.set_result(found.objects)
        return found.done

    def give_up(self, key: RoundKey, error: BaseException) -> None:
        """Fail the round for those who have come and those who still will."""
        with self._lock:
            found = self._open.get(key)
        if found is not None and not found.done.done():
            found.done.set_exception(error)  # type: ignore[arg-type]  # torch says T

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
        agent, keeper = self._calls.agent, key.workers[0]
        call = (_join, (key, agent.me.name, obj), dict[str, Any]())
        dest = agent.find_worker(keeper).id
        try:  # the keeper calls itself: what it gets must be its own, others are still being sent theirs
            objects: dict[str, Any] = self._calls.wait_result(self._calls.start_call(dest, call, timeout))
        except RpcTimeoutError:
            if keeper != agent.me.name:
                raise
            error = self._timeout(key, timeout)
            self.rounds.give_up(key, error)
            raise error from None
        return objects

    def _next(self, workers: tuple[str, ...]) -> RoundKey:
        with self._lock:
            number = self._counts[workers] = self._counts.get(workers, 0) + 1
        return RoundKey(workers, number)

    def _timeout(self, key: RoundKey, timeout: float) -> RpcTimeoutError:
        return RpcTimeoutError(
            f"{_describe(key)} timed out after {timeout:g} s",
            "every one of these workers must call it, the same number of times",
            worker=str(self._calls.agent.me),
            timeout=timeout,
        )


def _describe(key: RoundKey) -> str:
    return f"round {key.number} of {', '.join(key.workers)}"


@async_execution
def _join(key: tuple[tuple[str, ...], int], worker: str, obj: Any) -> torch.futures.Future[dict[str, Any]]:
    rounds: Rounds = get_current().gathering.rounds
    return rounds.join(RoundKey(*key), worker, obj)
