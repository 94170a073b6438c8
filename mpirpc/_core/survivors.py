"""Coming to rest together with the workers that are left: carries out ``rest_protocol.py``.

Thread: ``come_to_rest`` is called by one at a time; handlers by the one that polled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mpirpc._core import messages as m
from mpirpc._core.agent import Agent
from mpirpc._core.rest_protocol import RestTable, view_of
from mpirpc._core.transport import Transport
from mpirpc._core.wire import Incoming

WaitUntil = Callable[[Callable[[], bool], float], None]
"""Waits until something is true, or the deadline."""


class Survivors:
    """One worker's part in it.

    Args:
        agent: Sends the reports and knows who is dead.
        transport: Counts the messages.
    """

    def __init__(self, agent: Agent, transport: Transport) -> None:
        self._agent = agent
        self._transport = transport
        self._lock = threading.Lock()  # around what follows
        self._table = RestTable(len(agent.workers))
        agent.handlers |= {m.RestReport: self._on_report, m.AtRest: self._on_at_rest}

    def _on_report(self, source: int, incoming: Incoming) -> None:
        report = incoming.message
        assert isinstance(report, m.RestReport)
        with self._lock:
            self._table.add(source, report)

    def _on_at_rest(self, source: int, incoming: Incoming) -> None:
        message = incoming.message
        assert isinstance(message, m.AtRest)
        with self._lock:
            self._table.on_at_rest(message.phase)

    def come_to_rest(self, is_quiet: Callable[[], bool], wait_until: WaitUntil, deadline: float) -> None:
        """Wait until no living worker has anything to do and no message is under way between two of them.

        Errors of ``wait_until`` come out.
        """
        with self._lock:
            self._table.begin()
        lost = frozenset[int]()
        number = 0
        while not self._table.is_over:
            wait_until(lambda: is_quiet() or self._table.is_over, deadline)
            known = frozenset(self._agent.lost)
            if lost != known:
                lost, number = known, 0
            number += 1
            self._report(lost, number, is_quiet)
            self._wait_for_reports(lost, number, wait_until, deadline)
        self._tell(m.AtRest(self._table.phase))

    def _report(self, lost: frozenset[int], number: int, is_quiet: Callable[[], bool]) -> None:
        living = [worker.id for worker in self._agent.workers if worker.id not in lost]
        with self._agent.engine.stopped():
            counts = [self._transport.counts(rank) for rank in living]
        is_busy = not is_quiet()  # second: what was counted may be in somebody's hands
        with self._lock:
            sent, received = (sum(column) for column in zip(*counts, strict=True))
            report = m.RestReport(self._table.phase, view_of(lost), number, sent, received, is_busy)
            self._table.add(self._agent.rank, report)
        self._tell(report)

    def _wait_for_reports(
        self, lost: frozenset[int], number: int, wait_until: WaitUntil, deadline: float
    ) -> None:
        """Wait until all have reported, or a death makes their reports useless; judge them."""

        def is_complete() -> bool:
            with self._lock:
                return self._table.is_complete(lost, number)

        wait_until(lambda: is_complete() or self._table.is_over or lost != self._agent.lost, deadline)
        if is_complete():
            with self._lock:
                self._table.judge(lost, number)

    def _tell(self, message: m.RestReport | m.AtRest) -> None:
        for worker in self._agent.workers:
            if worker.id != self._agent.rank and worker.id not in self._agent.left:
                self._agent.send(worker.id, message)
