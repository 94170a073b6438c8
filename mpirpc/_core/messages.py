"""Ids, and one immutable class per message with who tells whom what.

Rules for this file: data only. How a message looks in bytes is ``wire.py``'s job, what it sets off is a
handler's. The two messages that every call needs are named tuples: they are made five times faster than
frozen dataclasses. A message is fixed fields (here) plus, for some kinds, a :class:`Body` (pickled payload,
tensors, RRef forks).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch


_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])


class RRefId(NamedTuple):
    """Name of an RRef's value: unique over workers and over time within one generation."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.created_on}.{self.local_id}"


class ForkId(NamedTuple):
    """Name of one user handle of an RRef; same form as :class:`RRefId`, another namespace."""

    created_on: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.created_on}.{self.local_id}"


class PassId(NamedTuple):
    """Name of one backward pass: the worker that called ``backward`` and its count there."""

    root: int
    number: int

    def __str__(self) -> str:
        return f"{self.root}.{self.number}"


@dataclass(frozen=True, slots=True)
class ForkDescriptor:
    """A handle on its way: what the receiver must know to adopt it.

    ``parent`` is the rank that sends it; ``parent == owner`` means the owner has recorded the fork already.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: int
    parent: int


Payload = bytes | bytearray | memoryview


FunctionName = tuple[str, str]
"""Module and name of a function there; an empty module means a method of the first argument's value."""

Flat = tuple[FunctionName | None, tuple[Any, ...], tuple[int, ...], tuple[int, ...]]
"""A simple call, or a simple result (no function): its values, and at which places tensors and RRefs stand.

The values are numbers, texts, bytes and None; at the places of tensors and RRefs stand their numbers among
the message's.
"""


@dataclass(slots=True)
class Body:
    """The variable part of a message: a payload, or in its stead something flat."""

    payload: Payload = b""
    tensors: list[torch.Tensor] = field(default_factory=list)
    forks: list[ForkDescriptor] = field(default_factory=list)
    flat: Flat | None = None


new_of: Callable[[type[_Tuple], tuple[Any, ...]], _Tuple] = tuple.__new__
"""Make a named tuple, given as a class, of all its fields: in half the time that the class itself takes."""

NO_CONTEXT = 0
"""``context_id`` of a message that belongs to no autograd context."""

NO_RREF = RRefId(0, 0)
"""``rref_id`` of a request whose result is sent back; local ids start at 1."""

NO_FORK = ForkId(0, 0)
"""``fork_id`` of a request that makes no user handle."""


class CallRequest(NamedTuple):
    """Caller to callee: run the call in the body; answered by CallResponse or ErrorResponse.

    With an ``rref_id`` the callee keeps the result as that RRef's value and answers with an empty response,
    which also confirms the fork. ``autograd_message_id`` is nonzero when tensors of the body carry gradients.
    """

    request_id: int
    context_id: int = NO_CONTEXT
    autograd_message_id: int = 0
    rref_id: RRefId = NO_RREF
    fork_id: ForkId = NO_FORK


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """User to owner: send me a copy of this RRef's value, when there is one."""

    request_id: int
    rref_id: RRefId
    context_id: int = NO_CONTEXT


class CallResponse(NamedTuple):
    """Callee to caller: the result, in the body."""

    request_id: int
    context_id: int = NO_CONTEXT
    autograd_message_id: int = 0


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Callee to caller: the exception, in the body."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """New user (child) to owner: please record this fork; answered by ForkAccept."""

    rref_id: RRefId
    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class ForkAccept:
    """Owner to child: your fork is recorded; the child then tells its parent."""

    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class ChildAccept:
    """Child to parent: the owner knows me; the parent may now let its own handle go."""

    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class UserDelete:
    """User to owner: this fork is gone. Sent once per fork, only after the owner has recorded it."""

    rref_id: RRefId
    fork_id: ForkId


@dataclass(frozen=True, slots=True)
class BackwardBegin:
    """To a worker that this one sent tensors to: the pass has begun, answer them.

    ``sent_up_to`` is the source's highest ``autograd_message_id`` that belongs to the pass. With
    ``wants_ack`` it is answered by BackwardAck (or by a Gradient that ``acks``) once the work it sets off is
    over.
    """

    context_id: int
    pass_id: PassId
    retain_graph: bool
    sent_up_to: int = 0
    wants_ack: bool = True


@dataclass(frozen=True, slots=True)
class Gradient:
    """Receiver to sender of tensors: their gradients (in the body), or that there is none; implies Begin.

    ``has_gradient`` false is the "none" answer. The body's payload says which of the message's tensors have
    one, see ``autograd_gradients.py``. ``acks`` makes it a BackwardAck as well.
    """

    context_id: int
    pass_id: PassId
    autograd_message_id: int
    has_gradient: bool
    retain_graph: bool
    sent_up_to: int = 0
    wants_ack: bool = True
    acks: bool = False


@dataclass(frozen=True, slots=True)
class BackwardAck:
    """The work set off by your message that wanted an acknowledgement is over."""

    context_id: int
    pass_id: PassId


@dataclass(frozen=True, slots=True)
class BackwardFailed:
    """To every neighbour in the context: the pass failed (the exception is in the body); drop it, tell yours.

    ``failed_on`` is the worker where it failed: who sends this may only pass it on.
    """

    context_id: int
    pass_id: PassId
    failed_on: int = 0


@dataclass(frozen=True, slots=True)
class ContextRelease:
    """To every worker that this one sent tensors or calls to: the context is over; free it, tell yours."""

    context_id: int


@dataclass(frozen=True, slots=True)
class Leave:
    """To every other worker: this one has left the group without waiting for it; expect nothing from it."""


@dataclass(frozen=True, slots=True)
class RestReport:
    """At shutdown, to every living worker, where workers may die: how much this one has to do.

    ``view`` names the set of workers that it knows to be dead; see ``rest_protocol.py``.
    """

    phase: int
    view: int
    number: int
    num_sent: int
    num_received: int
    is_busy: bool


@dataclass(frozen=True, slots=True)
class AtRest:
    """To every living worker: the reports show that all are at rest in this phase; tell the others."""

    phase: int


Message = (
    CallRequest
    | FetchRequest
    | CallResponse
    | ErrorResponse
    | ForkRequest
    | ForkAccept
    | ChildAccept
    | UserDelete
    | BackwardBegin
    | Gradient
    | BackwardAck
    | BackwardFailed
    | ContextRelease
    | Leave
    | RestReport
    | AtRest
)
"""Any message of the library."""
