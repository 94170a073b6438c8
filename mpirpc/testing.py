"""For tests: a whole RPC group in one process, with its network in the test's hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from mpirpc._core.agent import WorkerInfo
from mpirpc._core.current import set_thread_runtime
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport_loopback import LoopbackNetwork, LoopbackTransport
from mpirpc.options import MPIRpcBackendOptions

__all__ = ["LoopbackCluster"]


class LoopbackCluster:
    """``world_size`` workers in this process, joined by memory instead of MPI.

    The public API works on a worker's behalf inside ``with cluster.on(rank):``. Functions run by RPC see the
    worker that runs them. Leaving the cluster shuts all workers down gracefully, which includes the check for
    leaked RRefs.

    Args:
        world_size: Number of workers.
        options: Settings of all workers.
        names: Their names; default ``worker0``, ``worker1``, ...

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
    ) -> None:
        self.network = LoopbackNetwork(world_size)
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
