"""For tests: a whole RPC group in one process with its network in the test's hands, and a faulty network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from mpirpc._core import wire
from mpirpc._core.agent import WorkerInfo
from mpirpc._core.current import set_thread_runtime
from mpirpc._core.messages import Message
from mpirpc._core.runtime import Runtime
from mpirpc._core.timing import monotonic
from mpirpc._core.transport import Arrival, Outgoing, Transport, TransportStats
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc.errors import ConfigurationError, TransportError
from mpirpc.options import MPIRpcBackendOptions

__all__ = ["FaultyTransport", "LoopbackCluster"]

Fault = Callable[[int, Message], float | None]
"""Given the rank a message goes to and the message: seconds to hold it back (0: none), None to refuse it."""


class LoopbackCluster:
    """``world_size`` workers in this process, joined by memory instead of MPI.

    The public API works on a worker's behalf inside ``with cluster.on(rank):``. Functions run by RPC see the
    worker that runs them. Leaving the cluster shuts all workers down gracefully, which includes the check for
    leaked RRefs.

    Args:
        world_size: Number of workers.
        options: Settings of all workers.
        names: Their names; default ``worker0``, ``worker1``, ...

        survives_losses: Whether workers may be killed, by :meth:`kill`.

    Attributes:
        network: Holds, releases, reorders and drops messages, see ``LoopbackNetwork``.
        runtimes: The workers by rank.

    Example::

        with LoopbackCluster(2) as cluster, cluster.on(0):
            assert rpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    """

    def __init__(
        self,
        world_size: int,
        options: MPIRpcBackendOptions | None = None,
        names: Sequence[str] | None = None,
        survives_losses: bool = False,
    ) -> None:
        self.network = LoopbackNetwork(world_size, survives_losses)
        workers = [
            WorkerInfo(name, rank)
            for rank, name in enumerate(names or [f"worker{rank}" for rank in range(world_size)])
        ]
        self.runtimes = [
            Runtime(LoopbackTransport(self.network, rank), workers, options or MPIRpcBackendOptions())
            for rank in range(world_size)
        ]

    @contextmanager
    def on(self, rank: int) -> Iterator[Runtime]:
        """Be worker ``rank`` on this thread."""
        before = set_thread_runtime(self.runtimes[rank])
        try:
            yield self.runtimes[rank]
        finally:
            set_thread_runtime(before)

    def kill(self, rank: int) -> None:
        """Let worker ``rank`` die, as by ``kill -9``: the others find out, nothing else leaves it.

        Raises:
            ConfigurationError: The cluster was not made with ``survives_losses``.
        """
        if not self.network.survives_losses:
            raise ConfigurationError("this cluster does not survive losses", "pass survives_losses=True")
        self.network.kill(rank)
        self.runtimes[rank].shutdown(graceful=False, timeout=0)

    def shutdown(self, graceful: bool = True, timeout: float = 30.0) -> None:
        """Stop all workers.

        Raises:
            RpcError: The first error that a worker raised.
        """
        errors: list[BaseException] = []

        def stop(runtime: Runtime) -> None:
            try:
                runtime.shutdown(graceful, timeout)
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=stop, args=(runtime,)) for runtime in self.runtimes if runtime.is_running
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def __enter__(self) -> LoopbackCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.network.release_all()
        self.shutdown(graceful=error is None)


class FaultyTransport:
    """Wraps a transport, and refuses or holds back the messages that a rule names.

    A refused message fails as one that MPI does not take: its request ends with ``TransportError``. Nothing
    is lost without a word, as transports promise.

    Args:
        inner: The transport that carries the other messages; closed with this one.
        fault: The rule; called once for each message, by the thread that sends.
    """

    def __init__(self, inner: Transport, fault: Fault) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.survives_losses = inner.survives_losses
        self.bell = inner.bell
        self._inner = inner
        self._fault = fault
        self._held: list[tuple[float, int, Outgoing]] = []  # when to send it, where to, the message

    @property
    def on_lost(self) -> Callable[[int], None]:
        """What is called when a worker turns out to be dead."""
        return self._inner.on_lost

    @on_lost.setter
    def on_lost(self, callback: Callable[[int], None]) -> None:
        self._inner.on_lost = callback

    def post_send(self, dest: int, message: Outgoing) -> None:
        """Send, hold back or refuse a message.

        Raises:
            TransportError: It is refused.
        """
        content = wire.decode(bytearray(message.head), message.frames).message
        pause = self._fault(dest, content)
        if pause is None:
            raise TransportError(f"a faulty transport refused {type(content).__name__} to rank {dest}")
        if pause > 0:
            self._held.append((monotonic() + pause, dest, message))
        else:
            self._inner.post_send(dest, message)

    def poll(self) -> Sequence[Arrival]:
        """Send what has been held back long enough; return what has come."""
        if self._held:
            now = monotonic()
            due = [entry for entry in self._held if entry[0] <= now]
            self._held = [entry for entry in self._held if entry[0] > now]
            for _, dest, message in due:
                self._inner.post_send(dest, message)
        return self._inner.poll()

    def has_unfinished(self) -> bool:
        """Say whether a send or a receive is under way, or a message held back."""
        return bool(self._held) or self._inner.has_unfinished()

    def unfinished_nbytes(self, dest: int) -> int:
        """Return how many bytes to ``dest`` have not left yet."""
        held = sum(message.nbytes for _, to, message in self._held if to == dest)
        return held + self._inner.unfinished_nbytes(dest)

    def post_sum(self, values: Sequence[int]) -> None:
        """Start adding up ``values`` over all workers."""
        self._inner.post_sum(values)

    def poll_sum(self) -> list[int] | None:
        """Return the sums once every worker has taken part, else None."""
        return self._inner.poll_sum()

    def stats(self) -> TransportStats:
        """Return the counts of the wrapped transport."""
        return self._inner.stats()

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many messages went to ``rank`` and came from it."""
        return self._inner.counts(rank)

    def close(self, graceful: bool) -> None:
        """Close the wrapped transport; what is held back is dropped."""
        self._held.clear()
        self._inner.close(graceful)

    def abort(self) -> None:
        """End all workers' processes at once."""
        self._inner.abort()
