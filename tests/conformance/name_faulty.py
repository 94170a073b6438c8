"""torch's faulty agent: a backend whose transport refuses or delays the messages that a test names.

torch's agent sends control messages again that failed a few times. mpirpc's network promises not to lose
them, so here sending again is the transport's business: such a message arrives late. A call that fails is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mpirpc
from mpirpc._core import messages as m
from mpirpc._core.mpi_group import join_group
from mpirpc._core.runtime import Runtime
from mpirpc._core.transport_mpi import MPITransport
from mpirpc.testing import FaultyTransport
from tests.conformance.facades import Facade

NAME = "FAULTY_TENSORPIPE"

RESEND_AFTER = 0.05
"""Seconds until a control message that failed is sent again."""


class _Options(mpirpc.MPIRpcBackendOptions):
    """Options of the faulty agent, by torch's names.

    Attributes:
        num_fail_sends: How often sending a control message fails.
        messages_to_fail: torch's names of message types.
        messages_to_delay: torch's names of message types -> seconds.
    """

    def __init__(
        self,
        *,
        num_fail_sends: int = 0,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_fail_sends = num_fail_sends
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = dict(messages_to_delay or {})

    def fault(self, _dest: int, message: m.Message) -> float | None:
        """Decide about one message; see ``mpirpc.testing.FaultyTransport``."""
        names = _torch_names(message)
        delay = max((self.messages_to_delay.get(name, 0.0) for name in names), default=0.0)
        if not any(name in self.messages_to_fail for name in names):
            return delay
        is_request = isinstance(message, (m.CallRequest, m.FetchRequest))
        return None if is_request else delay + self.num_fail_sends * RESEND_AFTER


_CONTROL: Mapping[type, tuple[str, ...]] = {
    m.ForkRequest: ("RREF_FORK_REQUEST",),
    m.ChildAccept: ("RREF_CHILD_ACCEPT",),
    m.UserDelete: ("RREF_USER_DELETE",),
    m.ContextRelease: ("CLEANUP_AUTOGRAD_CONTEXT_REQ",),
    m.FetchRequest: ("PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL"),
}


def _torch_names(message: m.Message) -> tuple[str, ...]:
    """Return torch's types for a message; calls of Python and of TorchScript functions are one kind here."""
    if not isinstance(message, m.CallRequest):
        return _CONTROL.get(type(message), ())
    if message.rref_id != m.NO_RREF:
        return "PYTHON_REMOTE_CALL", "SCRIPT_REMOTE_CALL"
    return "PYTHON_CALL", "SCRIPT_CALL"


def _init(name: str | None, rank: int, world_size: int | None, options: _Options) -> Runtime:
    comm, names = join_group(options.comm, name, rank, world_size)
    workers = [mpirpc.WorkerInfo(worker, place) for place, worker in enumerate(names)]
    transport = FaultyTransport(MPITransport(comm, options.chunk_nbytes), options.fault)
    return Runtime(transport, workers, options)


def add(facades: Mapping[str, Facade]) -> None:
    """Register the backend, once."""
    if not mpirpc.backend_registry.backend_registered(NAME):
        mpirpc.backend_registry.register_backend(NAME, _Options, _init)
