"""Message <-> bytes: the general layout, and which messages are short (``short_messages.py``).

The head of a message of the general layout, little endian throughout::

    prefix      magic, kind, flags, num_storages, num_forks, num_tensors, payload_nbytes
    storages    num_storages x nbytes (bit 63: travels as a frame of its own, behind the head)
    fields      the kind's fixed fields, see _FIELDS
    forks       num_forks x (rref_id, fork_id, owner, parent)
    inline      the bytes of the storages that have no frame, one after the other
    tensors     num_tensors x description
    payload     pickled bytes

Storages and tensors are ``tensor_layout.py``'s; a payload above 1 MiB is a frame too, the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch

from mpirpc._core import messages as m
from mpirpc._core.devices import DeviceMap
from mpirpc._core.host_memory import in_huge_pages
from mpirpc._core.messages import Body, Flat, ForkDescriptor, ForkId, Message, Payload, RRefId
from mpirpc._core.short_messages import (
    LONE,
    NO_TENSORS,
    SHORT_MARK,
    Described,
    describe,
    flat_payload,
    frames_of_short,
    read_short,
    rebuild_short,
    write_short,
)
from mpirpc._core.sparse_layout import has_sparse, join, split
from mpirpc._core.tensor_layout import FIXED_NBYTES, FRAME_BIT, has_code, lay_out, new_tensor, rebuild
from mpirpc._core.transport import Outgoing
from mpirpc.errors import RemoteProtocolError

MAGIC = 0x5201
"""Two bytes that open every message that is not short; the low one is the version of this layout."""

PAYLOAD_IN_HEAD = 1 << 20
"""Larger payloads travel as a frame, the last one: a head stays far below what one MPI message can carry."""

PAYLOAD_IS_FRAME, HAS_SPARSE = 1, 2
"""Flags in the prefix."""

_PREFIX = struct.Struct("<HBBIIIQ")
_FORK = struct.Struct("<qqqqii")


class _Fields(NamedTuple):
    """How the fields of one kind of message become numbers and back.

    ``whole``: prefix and fields in one. ``flatten_short``: as ``flatten``, for short messages.
    """

    kind: int
    layout: struct.Struct
    whole: struct.Struct
    flatten: Callable[[Any], Sequence[int]]
    flatten_short: Callable[[Any], Sequence[int]]
    rebuild: Callable[..., Message]


def _derive(kind: int, cls: Any) -> _Fields:
    """Work out the layout of a kind of message: 64 bits for each number or flag, twice that for an id."""
    hints = get_type_hints(cls)
    names = list(hints)
    makers = [hints[name] for name in names]
    widths = [2 if issubclass(make, tuple) else 1 for make in makers]
    plan = [(make, widths[i], sum(widths[:i])) for i, make in enumerate(makers)]

    paths = [
        path
        for name, make in zip(names, makers, strict=True)
        for path in ([f"{name}.{part}" for part in make._fields] if issubclass(make, tuple) else [name])
    ]
    get = attrgetter(*paths) if paths else None

    def flatten(message: Any) -> Sequence[int]:
        if get is None:
            return ()
        numbers: Any = get(message)
        return numbers if len(paths) > 1 else (numbers,)

    def rebuild(*numbers: int) -> Message:
        message: Message = cls(
            *[
                m.new_of(make, numbers[at : at + 2]) if width == 2 else make(numbers[at])
                for make, width, at in plan
            ]
        )
        return message

    fields = "q" * sum(widths)
    whole = struct.Struct(_PREFIX.format + fields)
    return _Fields(kind, struct.Struct("<" + fields), whole, flatten, flatten, rebuild)


_KINDS: tuple[Any, ...] = (
    m.CallRequest,
    m.CallResponse,
    m.ErrorResponse,
    m.FetchRequest,
    m.ForkRequest,
    m.ForkAccept,
    m.ChildAccept,
    m.UserDelete,
    m.BackwardBegin,
    m.Gradient,
    m.BackwardAck,
    m.BackwardFailed,
    m.ContextRelease,
    m.Leave,
    m.RestReport,
    m.AtRest,
)
"""Position + 1 is the kind on the wire: append only."""

_FIELDS = {cls: _derive(place + 1, cls) for place, cls in enumerate(_KINDS)}
# the two of every call, written out: half the cost
_FIELDS[m.CallRequest] = _FIELDS[m.CallRequest]._replace(
    flatten=lambda x: (*x[:3], *x[3], *x[4]),
    flatten_short=lambda x: x[:3] if x[3] is m.NO_RREF else (*x[:3], *x[3], *x[4]),
    rebuild=lambda r, c, a, r0, r1, f0, f1: (
        m.CallRequest(r, c, a, RRefId(r0, r1), ForkId(f0, f1)) if r1 else m.CallRequest(r, c, a)
    ),
)
_FIELDS[m.CallResponse] = _FIELDS[m.CallResponse]._replace(
    flatten=tuple, flatten_short=tuple, rebuild=m.CallResponse
)
_FIELDS_BY_KIND = {fields.kind: fields for fields in _FIELDS.values()}
_CLASSES = {fields.kind: cls for cls, fields in _FIELDS.items()}

_NO_BODY = Body()

_KINDS_OF_RESTING = bytes(_FIELDS[cls].kind for cls in (m.RestReport, m.AtRest))


def is_about_rest(head: bytes | bytearray) -> bool:
    """Say whether a message is part of coming to rest, and so does not count there; none of these is short.

    The third byte of a short message is 0, a part of the number of its items.
    """
    return head[2] in _KINDS_OF_RESTING if len(head) > 2 else False


# --- encode ---


def encode(
    message: Message, body: Body | None, eager_limit: int, device_map: DeviceMap | None = None
) -> Outgoing:
    """Lay a message out for the transport.

    Tensors up to ``eager_limit`` bytes are copied into the head; larger ones stay where they are and are, or
    become, frames: they must not be changed until the receiver has them.

    Copies: small tensors once; large ones only if they are strided with gaps, or on a device.
    """
    body = body or _NO_BODY
    fields = _FIELDS[type(message)]
    payload, flat = body.payload, body.flat
    if flat is not None:
        if not body.forks:
            found = describe(body.tensors, eager_limit) if body.tensors else NO_TENSORS
            if found is not None:
                described, frames = found
                numbers = fields.flatten_short(message)
                return Outgoing(write_short(fields.kind, numbers, flat, described, bool(frames)), frames)
        payload = flat_payload(flat)
    if not body.tensors and not body.forks and len(payload) <= PAYLOAD_IN_HEAD:
        head = fields.whole.pack(MAGIC, fields.kind, 0, 0, 0, 0, len(payload), *fields.flatten(message))
        return Outgoing(head + payload, [])
    tensors, flags = body.tensors, 0
    if has_sparse(tensors):
        tensors, flags = split(tensors), HAS_SPARSE
    laid = lay_out(tensors, eager_limit, device_map)
    if len(payload) > PAYLOAD_IN_HEAD:
        frame = payload if isinstance(payload, bytearray) else bytearray(payload)
        laid.frames.append(torch.frombuffer(frame, dtype=torch.uint8))
        laid.sizes.append(len(payload) | FRAME_BIT)
        payload, flags = b"", flags | PAYLOAD_IS_FRAME
    sizes = laid.sizes
    prefix = _PREFIX.pack(MAGIC, fields.kind, flags, len(sizes), len(body.forks), len(tensors), len(payload))
    parts: list[Payload] = [prefix]
    if sizes:
        parts.append(struct.pack(f"<{len(sizes)}Q", *sizes))
    parts.append(fields.layout.pack(*fields.flatten(message)))
    if body.forks:
        parts += [_FORK.pack(*f.rref_id, *f.fork_id, f.owner, f.parent) for f in body.forks]
    parts += laid.inline
    parts += laid.descriptions
    parts.append(payload)
    return Outgoing(b"".join(parts), laid.frames)


# --- decode ---


@dataclass(slots=True)
class ShortIncoming:
    """A short message; it, and its tensors, are rebuilt when they are asked for."""

    kind: type[Any]
    numbers: tuple[int, ...]
    flat: Flat
    described: Sequence[Described]
    _frames: Sequence[torch.Tensor]

    num_forks: ClassVar[int] = 0

    @property
    def message(self) -> Message:
        """The message.

        Raises:
            RemoteProtocolError: It does not fit the layout.
        """
        kind, numbers = self.kind, self.numbers
        if kind is m.CallRequest and len(numbers) == 3:  # as nearly all are
            return m.new_of(m.CallRequest, (*numbers, m.NO_RREF, m.NO_FORK))
        try:
            return _FIELDS[kind].rebuild(*numbers)
        except TypeError as error:
            raise RemoteProtocolError(f"a short {self.kind.__name__} does not fit: {error}") from error

    @property
    def request_id(self) -> int:
        """Of a response: which request it answers."""
        return self.numbers[0]

    def forks(self) -> list[ForkDescriptor]:
        """Return nothing: a short message has no RRefs."""
        return []

    def body(self) -> tuple[Body, list[bool]]:
        """See :meth:`GeneralIncoming.body`."""
        try:
            tensors, needs_grad = rebuild_short(self.described, self._frames)
        except RemoteProtocolError:
            raise
        except Exception as error:  # damaged content makes torch and others complain, each in its way
            raise RemoteProtocolError(f"a short message does not fit the layout: {error}") from error
        return Body(b"", tensors, [], self.flat), needs_grad


@dataclass(slots=True)
class GeneralIncoming:
    """A message whose fixed part is decoded; the body is decoded when it is asked for."""

    message: Message
    _flags: int
    _head: bytearray
    _frames: Sequence[torch.Tensor]
    num_forks: int
    _num_tensors: int
    _payload_nbytes: int
    _sizes: tuple[int, ...]
    _offset: int

    @property
    def kind(self) -> type[Any]:
        """The class of the message."""
        return type(self.message)

    @property
    def request_id(self) -> int:
        """Of a response: which request it answers."""
        request_id: int = self.message.request_id  # type: ignore[union-attr]
        return request_id

    def forks(self) -> list[ForkDescriptor]:
        """Return the RRef handles in this message."""
        found = []
        for i in range(self.num_forks):
            r0, r1, f0, f1, owner, parent = _FORK.unpack_from(self._head, self._offset + i * _FORK.size)
            found.append(ForkDescriptor(RRefId(r0, r1), ForkId(f0, f1), owner, parent))
        return found

    def body(self) -> tuple[Body, list[bool]]:
        """Return payload, tensors and forks, and for each tensor whether it required grad at the sender.

        The tensors themselves never require grad. Copies: small tensors once, out of the head.

        Raises:
            RemoteProtocolError: The bytes do not fit the layout.
        """
        try:
            return self._decode_body()
        except RemoteProtocolError:
            raise
        except Exception as error:  # damaged bytes make struct, torch and others complain, each in its way
            raise RemoteProtocolError(f"a message does not fit the layout: {error}") from error

    def _decode_body(self) -> tuple[Body, list[bool]]:
        forks = self.forks() if self.num_forks else []
        at = self._offset + self.num_forks * _FORK.size
        tensors: list[torch.Tensor] = []
        needs_grad: list[bool] = []
        if self._num_tensors:
            tensors, needs_grad, at = rebuild(self._head, at, self._num_tensors, self._sizes, self._frames)
            if self._flags & HAS_SPARSE:
                tensors, needs_grad = join(tensors, needs_grad)
        if self._flags & PAYLOAD_IS_FRAME:
            payload = self._frames[-1].numpy().data
        elif at + self._payload_nbytes > len(self._head):
            raise RemoteProtocolError(f"a message's payload ends beyond its {len(self._head)} bytes")
        else:
            payload = memoryview(self._head)[at : at + self._payload_nbytes]
        return Body(payload, tensors, forks), needs_grad


Incoming = ShortIncoming | GeneralIncoming
"""A message that came."""


def frame_sizes(head: bytearray) -> list[int]:
    """Return the size in bytes of each frame that follows this head.

    Raises:
        RemoteProtocolError: These bytes are no message of this version of mpirpc.
    """
    if head[:1] == SHORT_MARK:
        return [nbytes for _, _, nbytes in frames_of_short(head)]
    if len(head) < _PREFIX.size:
        raise RemoteProtocolError(
            f"a message of {len(head)} bytes is shorter than the {_PREFIX.size} of a header"
        )
    magic, _, _, num_storages, _, _, _ = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        raise _other_version(magic)
    if not num_storages:
        return []
    if len(head) < _PREFIX.size + 8 * num_storages:
        raise RemoteProtocolError(f"a message of {len(head)} bytes cannot list {num_storages} storages")
    sizes = struct.unpack_from(f"<{num_storages}Q", head, _PREFIX.size)
    return [size ^ FRAME_BIT for size in sizes if size & FRAME_BIT]


def has_frames(head: bytearray) -> bool:
    """Say whether frames follow this head; not if it is no message of ours (its handler refuses it)."""
    if head.startswith(LONE):
        return False
    try:
        return head[:1] == SHORT_MARK or bool(frame_sizes(head))
    except RemoteProtocolError:
        return False


def ordinary_tensors() -> AbstractContextManager[Any]:
    """Make no inference tensors inside: this thread's mode is not that of who will use them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def new_frames(head: bytearray) -> list[torch.Tensor]:
    """Return host memory for each frame that follows this head: what is received there stays there.

    For what is no message of ours there is nothing. The frames are never inference tensors: the mode of the
    thread that receives is not that of whoever will use them.
    """
    with ordinary_tensors():
        try:
            if head[:1] == SHORT_MARK:
                return [_new_frame(*frame) for frame in frames_of_short(head)]
            return [_new_bytes(nbytes) for nbytes in frame_sizes(head)]
        except (RemoteProtocolError, TypeError, ValueError, LookupError):  # its handler will refuse it
            return []


def copy_of(frame: torch.Tensor) -> torch.Tensor:
    """Return a frame as it would arrive, for a message that takes no network."""
    with ordinary_tensors():
        return frame.clone(memory_format=torch.contiguous_format)


def _new_frame(code: int, shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
    if not has_code(code):  # received all the same: what follows must find its own memory
        return _new_bytes(nbytes)
    return in_huge_pages(new_tensor(code, shape, nbytes))


def _new_bytes(nbytes: int) -> torch.Tensor:
    return in_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def _other_version(magic: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"a message begins with {magic:#06x}, this version of mpirpc with {MAGIC:#06x}",
        "run the same version of mpirpc on every rank",
    )


def decode(head: bytearray, frames: Sequence[torch.Tensor]) -> Incoming:
    """Read the fixed part of a message.

    Raises:
        RemoteProtocolError: The bytes do not fit the layout, or the kind is unknown.
    """
    if head[:1] == SHORT_MARK:
        _, number, numbers, flat, described = read_short(head)
        kind_of_short = _CLASSES.get(number)
        if kind_of_short is None or not numbers:
            raise _unknown_kind(number)
        return ShortIncoming(kind_of_short, numbers, flat, described, frames)
    try:
        magic, kind, flags, num_storages, num_forks, num_tensors, payload_nbytes = _PREFIX.unpack_from(head)
        if magic != MAGIC:
            raise _other_version(magic)
        at = _PREFIX.size
        sizes: tuple[int, ...] = ()
        if num_storages:
            sizes = struct.unpack_from(f"<{num_storages}Q", head, at)
            at += 8 * num_storages
        fields = _FIELDS_BY_KIND[kind]
        message = fields.rebuild(*fields.layout.unpack_from(head, at))
    except KeyError:
        raise _unknown_kind(kind) from None
    except struct.error as error:
        raise RemoteProtocolError(f"a message is cut short: {error}") from error
    at += fields.layout.size
    if at + num_forks * _FORK.size + num_tensors * FIXED_NBYTES + payload_nbytes > len(head):
        raise RemoteProtocolError(f"a message of kind {kind} is cut short at {len(head)} bytes")
    return GeneralIncoming(message, flags, head, frames, num_forks, num_tensors, payload_nbytes, sizes, at)


def _unknown_kind(kind: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"a message of unknown kind {kind}", "run the same version of mpirpc on every rank"
    )
