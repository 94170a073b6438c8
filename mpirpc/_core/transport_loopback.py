"""A transport in memory: n workers in one process, delivery under the test's control.

A :class:`LoopbackNetwork` joins the transports of one group. By default a message is there at once. A test
can hold messages back and let them go one by one in any order, or drop them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from mpirpc._core.transport import Arrival, Bell, Outgoing, TransportStats
from mpirpc._core.wire import copy_of, is_about_rest
from mpirpc.errors import WorkerLostError

Selector = Callable[[int, int, bytearray], bool]
"""Given source, dest and head of a message: is it one of those meant?"""


class LoopbackNetwork:
    """The wires between ``world_size`` loopback transports.

    Attributes:
        held: Messages kept back, oldest first, as ``(dest, arrival)``. Changed under the network's lock.
        dropped: How many messages were thrown away.
        dead: Workers that :meth:`kill` was called for.
        survives_losses: Whether workers may be killed.
    """

    def __init__(self, world_size: int, survives_losses: bool = False) -> None:
        self.world_size = world_size
        self.survives_losses = survives_losses
        self.dead: list[int] = []
        self.held: list[tuple[int, Arrival]] = []
        self.dropped = 0
        self._lock = threading.Lock()
        self._inboxes: list[deque[Arrival]] = [deque() for _ in range(world_size)]
        self._holds: Selector | None = None
        self._drops: Selector | None = None
        self._sums: dict[int, list[Sequence[int]]] = {}

    def hold(self, selector: Selector = lambda source, dest, head: True) -> None:
        """Keep back messages from now on that ``selector`` names (default: all)."""
        self._holds = selector

    def drop(self, selector: Selector) -> None:
        """Throw away messages from now on that ``selector`` names."""
        self._drops = selector

    def kill(self, rank: int) -> None:
        """From now on worker ``rank`` is dead: nothing comes from it or gets there; the others find out."""
        with self._lock:
            self.held = [(dest, arrival) for dest, arrival in self.held if rank not in (dest, arrival.source)]
            self._inboxes[rank].clear()
            self.dead.append(rank)

    def release(self, index: int = 0) -> None:
        """Deliver one held message, by its place in ``held``."""
        with self._lock:
            dest, arrival = self.held.pop(index)
            self._inboxes[dest].append(arrival)

    def release_all(self) -> None:
        """Deliver what is held, and hold or drop nothing more."""
        with self._lock:
            self._holds = self._drops = None
            for dest, arrival in self.held:
                self._inboxes[dest].append(arrival)
            self.held.clear()

    def carry(self, dest: int, arrival: Arrival) -> None:
        """Take a message from a transport: deliver, hold or drop it."""
        with self._lock:
            if arrival.source in self.dead or dest in self.dead:
                self.dropped += 1
            elif self._drops is not None and self._drops(arrival.source, dest, arrival.head):
                self.dropped += 1
            elif self._holds is not None and self._holds(arrival.source, dest, arrival.head):
                self.held.append((dest, arrival))
            else:
                self._inboxes[dest].append(arrival)

    def take(self, rank: int) -> Arrival | None:
        """Return the next message for ``rank``, or None."""
        try:
            return self._inboxes[rank].popleft()
        except IndexError:
            return None

    def add_to_sum(self, number: int, values: Sequence[int]) -> None:
        """Take part in sum number ``number``."""
        with self._lock:
            self._sums.setdefault(number, []).append(values)

    def sum(self, number: int) -> list[int] | None:
        """Return sum number ``number`` if every worker has taken part."""
        with self._lock:
            parts = self._sums.get(number, [])
            return (
                [sum(column) for column in zip(*parts, strict=True)]
                if len(parts) == self.world_size
                else None
            )


class LoopbackTransport:
    """One worker's end of a :class:`LoopbackNetwork`."""

    def __init__(self, network: LoopbackNetwork, rank: int) -> None:
        self.rank = rank
        self.world_size = network.world_size
        self._network = network
        self.survives_losses = network.survives_losses
        self.bell: Bell | None = None
        self.on_lost: Callable[[int], None] = lambda rank: None
        self._num_lost = 0  # how many of the network's dead have been told of
        self._sent_to = [0] * network.world_size
        self._received_from = [0] * network.world_size
        self._num_sums = 0
        self._sent = self._received = self._sent_nbytes = self._received_nbytes = 0

    def post_send(self, dest: int, message: Outgoing) -> None:
        """Copy the message and hand it to the network.

        Raises:
            WorkerLostError: ``dest`` is dead.
        """
        if dest in self._network.dead:
            raise WorkerLostError(f"rank {dest} has died")
        if not is_about_rest(message.head):
            self._sent_to[dest] += 1
        self._sent += 1
        self._sent_nbytes += message.nbytes
        frames = [copy_of(frame) for frame in message.frames]
        self._network.carry(dest, Arrival(self.rank, bytearray(message.head), frames))

    def poll(self) -> Sequence[Arrival]:
        """Return the next message, if there is one."""
        while self._num_lost < len(self._network.dead):
            self.on_lost(self._network.dead[self._num_lost])
            self._num_lost += 1
        arrival = self._network.take(self.rank)
        if arrival is None:
            return ()
        if not is_about_rest(arrival.head):
            self._received_from[arrival.source] += 1
        self._received += 1
        self._received_nbytes += arrival.nbytes
        return (arrival,)

    def has_unfinished(self) -> bool:
        """Say that nothing is ever under way: sending copies."""
        return False

    def unfinished_nbytes(self, dest: int) -> int:
        """Return 0: sending copies."""
        return 0

    def post_sum(self, values: Sequence[int]) -> None:
        """Take part in the group's next sum."""
        self._num_sums += 1
        self._network.add_to_sum(self._num_sums, values)

    def poll_sum(self) -> list[int] | None:
        """Return the latest sum if every worker has taken part."""
        return self._network.sum(self._num_sums)

    def stats(self) -> TransportStats:
        """Return the counts so far."""
        return TransportStats(self._sent, self._sent_nbytes, self._received, self._received_nbytes, 0, 0)

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many messages went to ``rank`` and came from it."""
        return self._sent_to[rank], self._received_from[rank]

    def close(self, graceful: bool) -> None:
        """Do nothing: memory is freed with the network."""

    def abort(self) -> None:
        """Do nothing: the other workers are this process."""
