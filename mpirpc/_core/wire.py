"""Message <-> bytes: the only file that knows the layout.

The head of a message, little endian throughout::

    prefix      magic, kind, -, num_storages, num_forks, num_tensors, payload_nbytes
    storages    num_storages x nbytes (bit 63: travels as a frame of its own, behind the head)
    fields      the kind's fixed fields, see _FIELDS
    forks       num_forks x (rref_id, fork_id, owner, parent)
    tensors     num_tensors x (dtype, flags, ndim, device, storage, offset; sizes; strides unless contiguous)
    payload     pickled bytes
    inline      the bytes of the storages that have no frame, one after the other

A *storage* here is a range of bytes that one or more tensors of the message cover. Tensors that overlap in
memory share one, so that they share memory at the receiver too; a view sends only what it covers.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import torch

from mpirpc._core import messages as m
from mpirpc._core.devices import HOST, DeviceMap, device_code, device_from_code
from mpirpc._core.messages import Body, ForkDescriptor, ForkId, Message, RRefId
from mpirpc._core.transport import Outgoing
from mpirpc.errors import RemoteProtocolError

MAGIC = 0x5201
"""Two bytes that open every message; the low one is the version of this layout."""

FRAME_BIT = 1 << 63

_PREFIX = struct.Struct("<HBBIIIQ")
_FORK = struct.Struct("<qqqqii")
_TENSOR = struct.Struct("<BBBBIq")

_REQUIRES_GRAD, _CONTIGUOUS, _WHOLE = 1, 2, 4
"""Tensor flags; WHOLE: contiguous, and the only tensor of its storage, from its first to its last byte."""

_DTYPE_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64"
).split()
"""Position is the number on the wire: append only."""

_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}


class _Fields(NamedTuple):
    """How the fields of one kind of message become numbers and back; ``whole``: prefix and fields in one."""

    kind: int
    layout: struct.Struct
    whole: struct.Struct
    flatten: Callable[[Any], Sequence[int]]
    rebuild: Callable[..., Message]


def _derive(kind: int, cls: Any) -> _Fields:
    """Work out the layout of a kind of message: 64 bits for each number or flag, twice that for an id."""
    hints = get_type_hints(cls)
    names = list(hints)
    makers = [hints[name] for name in names]
    widths = [2 if issubclass(make, tuple) else 1 for make in makers]
    starts = [sum(widths[:i]) for i in range(len(widths))]

    def flatten(message: Any) -> list[int]:
        numbers: list[int] = []
        for name, width in zip(names, widths, strict=True):
            value = getattr(message, name)
            numbers += value if width == 2 else (value,)
        return numbers

    def rebuild(*numbers: int) -> Message:
        values = [
            make(*numbers[at : at + 2]) if width == 2 else make(numbers[at])
            for make, width, at in zip(makers, widths, starts, strict=True)
        ]
        message: Message = cls(*values)
        return message

    fields = "q" * sum(widths)
    return _Fields(
        kind, struct.Struct("<" + fields), struct.Struct(_PREFIX.format + fields), flatten, rebuild
    )


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
)
"""Position + 1 is the kind on the wire: append only."""

_FIELDS = {cls: _derive(place + 1, cls) for place, cls in enumerate(_KINDS)}
# the two of every call, written out: half the cost
_FIELDS[m.CallRequest] = _FIELDS[m.CallRequest]._replace(
    flatten=lambda x: (x.request_id, x.context_id, x.autograd_message_id, *x.rref_id, *x.fork_id),
    rebuild=lambda r, c, a, r0, r1, f0, f1: m.CallRequest(r, c, a, RRefId(r0, r1), ForkId(f0, f1)),
)
_FIELDS[m.CallResponse] = _FIELDS[m.CallResponse]._replace(flatten=lambda x: x, rebuild=m.CallResponse)
_FIELDS_BY_KIND = {fields.kind: fields for fields in _FIELDS.values()}

_NO_BODY = Body()


# --- encode ---


def encode(
    message: Message, body: Body | None, eager_limit: int, device_map: DeviceMap | None = None
) -> Outgoing:
    """Lay a message out for the transport.

    Tensors up to ``eager_limit`` bytes are copied into the head; larger ones stay where they are and become
    frames: they must not be changed until the receiver has them.

    Copies: small tensors once; large ones only if they are strided with gaps, or on a device.
    """
    body = body or _NO_BODY
    fields = _FIELDS[type(message)]
    if not body.tensors and not body.forks:
        head = fields.whole.pack(MAGIC, fields.kind, 0, 0, 0, 0, len(body.payload), *fields.flatten(message))
        return Outgoing(head + body.payload, [])
    storages = _plan_storages(body.tensors) if body.tensors else []
    sizes, inline, frames, tensors = [], [], [], [b""] * len(body.tensors)
    for index, storage in enumerate(storages):
        if storage.nbytes > eager_limit:
            frames.append(storage.as_frame())
            sizes.append(storage.nbytes | FRAME_BIT)
        else:
            inline.append(ctypes.string_at(storage.address, storage.nbytes))
            sizes.append(storage.nbytes)
        for position, tensor in storage.tensors:
            code = device_code(body.tensors[position], device_map)
            tensors[position] = _describe(tensor, code, index, storage, body.tensors[position].requires_grad)
    prefix = _PREFIX.pack(MAGIC, fields.kind, 0, len(sizes), len(body.forks), len(tensors), len(body.payload))
    parts: list[bytes | memoryview] = [prefix]
    if sizes:
        parts.append(struct.pack(f"<{len(sizes)}Q", *sizes))
    parts.append(fields.layout.pack(*fields.flatten(message)))
    if body.forks:
        parts += [_FORK.pack(*f.rref_id, *f.fork_id, f.owner, f.parent) for f in body.forks]
    parts += tensors
    parts.append(body.payload)
    parts += inline
    return Outgoing(b"".join(parts), frames)


@dataclass(slots=True)
class _Storage:
    """A range of memory that goes on the wire, and the tensors in it with their place in the message."""

    address: int
    nbytes: int
    tensors: list[tuple[int, torch.Tensor]]

    def as_frame(self) -> torch.Tensor:
        owner = self.tensors[0][1].untyped_storage()
        offset = self.address - owner.data_ptr()
        return torch.empty(0, dtype=torch.uint8).set_(owner, offset, (self.nbytes,), (1,))


def _plan_storages(tensors: Sequence[torch.Tensor]) -> list[_Storage]:
    """Find the ranges of memory to send: one per group of tensors that overlap."""
    on_host = [t if t.device.type == "cpu" else t.detach().cpu() for t in tensors]
    if len(on_host) == 1:
        return [_storage_of_one(0, on_host[0])]
    order = sorted(range(len(on_host)), key=lambda i: on_host[i].data_ptr())
    groups: list[_Storage] = []
    for position in order:
        tensor = on_host[position]
        start, nbytes = tensor.data_ptr(), _span(tensor) * tensor.element_size()
        last = groups[-1] if groups else None
        overlaps = last is not None and nbytes and start < last.address + last.nbytes
        if last is not None and overlaps and _memory_of(tensor) == _memory_of(last.tensors[0][1]):
            last.nbytes = max(last.nbytes, start + nbytes - last.address)
            last.tensors.append((position, tensor))
        else:
            groups.append(_Storage(start, nbytes, [(position, tensor)]))
    return [
        _storage_of_one(*group.tensors[0]) if len(group.tensors) == 1 else _aligned(group) for group in groups
    ]


def _storage_of_one(position: int, tensor: torch.Tensor) -> _Storage:
    if not tensor.is_contiguous() and _span(tensor) > tensor.numel():
        tensor = tensor.detach().contiguous()
    return _Storage(tensor.data_ptr(), _span(tensor) * tensor.element_size(), [(position, tensor)])


def _aligned(group: _Storage) -> _Storage:
    """Move the start down so that every tensor's offset is a whole number of its elements.

    Views of one memory with element types of different size may start at odd places; allocations are aligned
    to 16 at least, so moving down by less stays inside.
    """
    if any((t.data_ptr() - group.address) % t.element_size() for _, t in group.tensors):
        excess = (group.address - _memory_of(group.tensors[0][1])[0]) % 16
        group.address -= excess
        group.nbytes += excess
    return group


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and size of a tensor's whole memory; two made from one numpy array may differ in it."""
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.nbytes()


def _span(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first to the last of this tensor in memory."""
    if tensor.is_contiguous():
        return tensor.numel()
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _describe(tensor: torch.Tensor, device: int, index: int, storage: _Storage, requires_grad: bool) -> bytes:
    shape, offset = tensor.shape, (tensor.data_ptr() - storage.address) // tensor.element_size()
    flags, numbers = _REQUIRES_GRAD if requires_grad else 0, tuple(shape)
    if tensor.is_contiguous():
        flags |= _CONTIGUOUS | (_WHOLE if len(storage.tensors) == 1 else 0)
    else:
        numbers += tensor.stride()
    fixed = _TENSOR.pack(
        _DTYPE_CODES[tensor.dtype], flags, len(shape), device, index, offset if tensor.numel() else 0
    )
    return fixed + struct.pack(f"<{len(numbers)}q", *numbers) if numbers else fixed


def has_dtype(dtype: torch.dtype) -> bool:
    """Say whether tensors of this dtype can travel as plain bytes."""
    return dtype in _DTYPE_CODES


# --- decode ---


@dataclass(slots=True)
class Incoming:
    """A message whose fixed part is decoded; the body is decoded when it is asked for."""

    message: Message
    _head: bytearray
    _frames: list[torch.Tensor]
    _num_forks: int
    _num_tensors: int
    _payload_nbytes: int
    _sizes: tuple[int, ...]
    _offset: int

    def forks(self) -> list[ForkDescriptor]:
        """Return the RRef handles in this message."""
        found = []
        for i in range(self._num_forks):
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
        forks = self.forks() if self._num_forks else []
        at = self._offset + self._num_forks * _FORK.size
        if not self._num_tensors:
            return Body(memoryview(self._head)[at : at + self._payload_nbytes], [], forks), []
        parts: list[tuple[int, ...]] = []
        shapes: list[tuple[int, ...]] = []
        for _ in range(self._num_tensors):
            part = _TENSOR.unpack_from(self._head, at)
            count = part[2] if part[1] & _CONTIGUOUS else 2 * part[2]
            at += _TENSOR.size
            shapes.append(struct.unpack_from(f"<{count}q", self._head, at))
            parts.append(part)
            at += 8 * count
        payload = memoryview(self._head)[at : at + self._payload_nbytes]
        storages = _Storages(self._head, at + self._payload_nbytes, self._sizes, self._frames)
        tensors = [storages.tensor(part, numbers) for part, numbers in zip(parts, shapes, strict=True)]
        return Body(payload, tensors, forks), [bool(part[1] & _REQUIRES_GRAD) for part in parts]


def frame_sizes(head: bytearray) -> list[int]:
    """Return the size in bytes of each frame that follows this head.

    Raises:
        RemoteProtocolError: These bytes are no message of this version of mpirpc.
    """
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


def _other_version(magic: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"a message begins with {magic:#06x}, this version of mpirpc with {MAGIC:#06x}",
        "run the same version of mpirpc on every rank",
    )


def decode(head: bytearray, frames: list[torch.Tensor]) -> Incoming:
    """Read the fixed part of a message.

    Raises:
        RemoteProtocolError: The bytes do not fit the layout, or the kind is unknown.
    """
    try:
        magic, kind, _, num_storages, num_forks, num_tensors, payload_nbytes = _PREFIX.unpack_from(head)
        if magic != MAGIC:
            raise _other_version(magic)
        at = _PREFIX.size
        sizes = struct.unpack_from(f"<{num_storages}Q", head, at) if num_storages else ()
        at += 8 * num_storages
        fields = _FIELDS_BY_KIND[kind]
        message = fields.rebuild(*fields.layout.unpack_from(head, at))
    except KeyError:
        raise RemoteProtocolError(
            f"a message of unknown kind {kind}", "run the same version of mpirpc on every rank"
        ) from None
    except struct.error as error:
        raise RemoteProtocolError(f"a message is cut short: {error}") from error
    at += fields.layout.size
    if at + num_forks * _FORK.size + num_tensors * _TENSOR.size + payload_nbytes > len(head):
        raise RemoteProtocolError(f"a message of kind {kind} is cut short at {len(head)} bytes")
    return Incoming(message, head, frames, num_forks, num_tensors, payload_nbytes, sizes, at)


class _Storages:
    """The storages of one arrived message, made into tensors' memory when first needed."""

    def __init__(self, head: bytearray, at: int, sizes: tuple[int, ...], frames: list[torch.Tensor]) -> None:
        self._head = head
        self._memory: list[torch.Tensor | tuple[int, int]] = []  # a frame, or (offset in head, nbytes)
        left = iter(frames)
        for size in sizes:
            if size & FRAME_BIT:
                self._memory.append(next(left))
            else:
                self._memory.append((at, size))
                at += size
        if at > len(head):
            raise RemoteProtocolError(f"a message's tensors end at byte {at} of {len(head)}")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(head))

    def tensor(self, part: tuple[int, ...], numbers: tuple[int, ...]) -> torch.Tensor:
        code, flags, ndim, device, index, offset = part
        dtype, shape, memory = _DTYPES[code], numbers[:ndim], self._memory[index]
        if dtype is None:
            raise RemoteProtocolError(f"torch {torch.__version__} has no {_DTYPE_NAMES[code]} tensors")
        if flags & _WHOLE and isinstance(memory, tuple):
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes != memory[1]:  # before any memory is taken
                raise RemoteProtocolError(f"a tensor of {nbytes} bytes came with {memory[1]} bytes")
            tensor = torch.empty(shape, dtype=dtype)
            ctypes.memmove(tensor.data_ptr(), self._address + memory[0], memory[1])
        else:
            strides = _contiguous_strides(shape) if flags & _CONTIGUOUS else numbers[ndim:]
            storage = self._materialize(index).untyped_storage()
            last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            end = (last + 1) * dtype.itemsize
            if 0 not in shape and end > storage.nbytes():  # set_ would make the storage larger
                raise RemoteProtocolError(f"a tensor ends at byte {end} of {storage.nbytes()}")
            tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
        return tensor if device == HOST else tensor.to(device_from_code(device))

    def _materialize(self, index: int) -> torch.Tensor:
        memory = self._memory[index]
        if isinstance(memory, tuple):
            at, nbytes = memory
            memory = torch.empty(nbytes, dtype=torch.uint8)
            ctypes.memmove(memory.data_ptr(), self._address + at, nbytes)
            self._memory[index] = memory
        return memory


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
