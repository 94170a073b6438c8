"""What a transport is: it carries messages between the workers of one group, whatever they mean.

Words: a message is a *head* (small, sent at once) and *frames* (large buffers sent on their own, one per
storage).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,127}")


def check_name(name: object) -> str:
    """Say what is wrong with a worker's name; nothing if it is allowed."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return ""
    return f"the name {name!r} is not allowed: 1 to 127 letters, digits, '_', '-', ':', '.'"


@dataclass(slots=True)
class Outgoing:
    """A message ready to leave.

    Attributes:
        head: Header, payload and small tensors, as ``wire.py`` laid them out.
        frames: Contiguous host tensors; they must stay untouched until the receiver has them.
        on_failed: Called once, on any thread, if the transport refuses the message.
    """

    head: bytes
    frames: Sequence[torch.Tensor]
    on_failed: Callable[[BaseException], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of head and frames."""
        nbytes = len(self.head)
        return nbytes + sum(frame.nbytes for frame in self.frames) if self.frames else nbytes


@dataclass(slots=True)
class Arrival:
    """A message that came, whole.

    Attributes:
        source: Rank of the sender.
        head: As the sender laid it out; writable, owned by whoever handles the arrival.
        frames: As they left, each alone in fresh memory; see :func:`mpirpc._core.wire.new_frames`.
    """

    source: int
    head: bytearray
    frames: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of head and frames."""
        nbytes = len(self.head)
        return nbytes + sum(frame.nbytes for frame in self.frames) if self.frames else nbytes


@dataclass(frozen=True, slots=True)
class TransportStats:
    """Counts since the transport was opened."""

    messages_sent: int
    bytes_sent: int
    messages_received: int
    bytes_received: int
    unfinished_messages: int
    unfinished_nbytes: int


class Bell(Protocol):
    """What an idle worker sleeps beside: it rings when a message comes, or a sum begins, after some time.

    Only a hint: a worker that is not woken looks a little later.
    """

    def rouse(self, rank: int) -> None:
        """Wake a worker that may sleep: something is about to be sent to it. Thread: any."""

    def sleep(self, timeout: float) -> bool:
        """Sleep until it rings, ``timeout`` seconds at most; say whether it rang. Thread: one at a time."""

    def ring_here(self) -> None:
        """End this worker's sleep. Thread: any."""


class Transport(Protocol):
    """A group's network as one worker sees it.

    Attributes:
        on_lost: Called once for each worker that turns out to be dead, inside ``poll`` or ``post_send``.
        survives_losses: Whether that can be; if not, the death of one worker ends the job.

    Every method is called by one thread at a time: the holder of the progress engine's lock. None blocks,
        except
    ``close``. Messages are never lost or doubled, but with a dead worker; no order is promised between two of
    them.
    """

    rank: int
    world_size: int
    on_lost: Callable[[int], None]
    survives_losses: bool

    @property
    def bell(self) -> Bell | None:
        """If there is one, every worker of the group can ring it."""

    def post_send(self, dest: int, message: Outgoing) -> None:
        """Start sending ``message``; the transport keeps it alive until it has left.

        Raises:
            WorkerLostError: ``dest`` is dead.
        """

    def poll(self) -> Sequence[Arrival]:
        """Move everything forward a step; return the messages that are complete, a few at most."""

    def has_unfinished(self) -> bool:
        """Say whether a send or a receive is under way."""

    def unfinished_nbytes(self, dest: int) -> int:
        """Return how many bytes to ``dest`` have not left yet."""

    def post_sum(self, values: Sequence[int]) -> None:
        """Start adding up ``values`` over all workers; each worker takes part once, in the same order."""

    def poll_sum(self) -> list[int] | None:
        """Return the sums once every worker has taken part, else None."""

    def stats(self) -> TransportStats:
        """Return the counts so far."""

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many messages went to ``rank`` and came from it, without those of coming to rest.

        Counted only where workers may die.
        """

    def close(self, graceful: bool) -> None:
        """Give everything back. Graceful: all workers do it together and nothing is under way."""

    def abort(self) -> None:
        """End all workers' processes at once."""
