"""What a worker runs for others, in torch's profiler; the calls that it makes show by themselves."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent

from mpirpc._core.current import get_current
from mpirpc._core.timing import GilWait

__all__ = ["measure_gil_wait", "profile_served_calls"]


def measure_gil_wait(enabled: bool = True) -> None:
    """Measure from now on how long this worker waits for the interpreter lock when it looks at the network.

    ``debug_info()`` then has the average as ``gil_wait_us``: about 1 us on a quiet worker. Hundreds mean
    that other threads of the process run pure-Python code, and that calls wait for them.

    Raises:
        NotInitializedError: RPC does not run.
    """
    get_current().agent.engine.gil_wait = GilWait() if enabled else None


class profile_served_calls:
    """Record the operators of every call that this worker runs while the block is open, whoever makes it.

    Blocks may overlap, and may be opened and closed by a call, so a client can look into its server.

    Attributes:
        calls: One list of events, in order of time, for each call whose function began in the block and has
            ended.

    Raises:
        NotInitializedError: On entering: RPC does not run.

    Thread: any.

    Example::

        with mpirpc.profiler.profile_served_calls() as profile:
            time.sleep(10)
        print(profile.key_averages().table(sort_by="cpu_time_total"))
    """

    def __init__(self) -> None:
        self.calls: list[list[FunctionEvent]] = []

    def __enter__(self) -> profile_served_calls:
        self._observers: Any = get_current().server.observers
        self._observers.append(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observers.remove(self._note)

    def _note(self, events: list[FunctionEvent]) -> None:
        call: Any = EventList(events)  # type: ignore[no-untyped-call]
        call._build_tree()  # each call by itself: their times begin at 0
        self.calls.append(call)

    def key_averages(self, group_by_input_shape: bool = False) -> Any:
        """Return all events grouped by operator, as torch's profilers do."""
        events: Any = EventList([event for call in self.calls for event in call])  # type: ignore[no-untyped-call]
        events._tree_built = True  # of each call
        return events.key_averages(group_by_input_shape)
