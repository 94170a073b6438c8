"""How much is under way to each worker, and the limit above which callers have to wait.

Two counts: bytes that the transport has not sent yet, and bytes of calls that were started without waiting
and have no answer. The second bounds what piles up at a callee that is slower than its callers. A thread that
runs a call is not held up by it: the answers that it waits for may wait for its own.
"""

from __future__ import annotations

import threading
from collections.abc import Container

from mpirpc._core.transport import Transport
from mpirpc._core.waiter import Waiter
from mpirpc.errors import RpcTimeoutError

OVERHEAD = 512
"""What a waiting call costs its callee beside its bytes, roughly."""


class Flow:
    """Counts of one worker.

    Args:
        transport: Knows what it has not sent.
        limit: Bytes per callee.
        left: Workers that have left; nobody waits for them.
    """

    def __init__(self, transport: Transport, limit: int, left: Container[int]) -> None:
        self._transport = transport
        self._limit = limit
        self._left = left
        self._lock = threading.Lock()  # around _unanswered
        self._unanswered: dict[int, int] = {}  # dest -> bytes; add() adds, remove() takes off

    def add(self, dest: int, nbytes: int) -> int:
        """Count a call; return what to :meth:`remove` when it is over."""
        nbytes += OVERHEAD
        with self._lock:
            self._unanswered[dest] = self._unanswered.get(dest, 0) + nbytes
        return nbytes

    def remove(self, dest: int, nbytes: int) -> None:
        """A call that was counted is over."""
        with self._lock:
            self._unanswered[dest] -= nbytes

    def is_clogged(self, dest: int) -> bool:
        """Say whether the transport has too much to send."""
        return self._transport.unfinished_nbytes(dest) > self._limit

    def is_full(self, dest: int) -> bool:
        """Say whether too much has no answer yet."""
        return self._unanswered.get(dest, 0) > self._limit

    def below_limit(self, dest: int, counts_unanswered: bool) -> Waiter:
        """Return what is done when a call may be sent."""
        return _BelowLimit(self, dest, counts_unanswered, self._left)

    def held_up(self, what: str, callee: str, timeout: float) -> RpcTimeoutError:
        """Return the error of a call whose time was over before it could be sent."""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({timeout:g} s): {what} was not sent to {callee}, for which "
            f"more than max_unfinished_nbytes = {self._limit} are under way",
            "that worker is slower than its callers: raise timeout=, or start fewer calls at a time",
            worker=callee,
            timeout=timeout,
        )


class _BelowLimit(Waiter):
    __slots__ = ("_counts_unanswered", "_dest", "_flow", "_left")

    def __init__(self, flow: Flow, dest: int, counts_unanswered: bool, left: Container[int]) -> None:
        self._flow, self._dest, self._counts_unanswered, self._left = flow, dest, counts_unanswered, left
        super().__init__()

    @property
    def done(self) -> bool:
        dest = self._dest
        if dest in self._left:
            return True
        return not (self._flow.is_clogged(dest) or (self._counts_unanswered and self._flow.is_full(dest)))

    @done.setter
    def done(self, value: bool) -> None:
        return
