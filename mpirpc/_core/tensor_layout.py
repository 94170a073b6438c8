"""Tensors <-> bytes: which ranges of memory go into a message, and how each tensor lies in them.

A *storage* here is a range of bytes that one or more tensors of the message cover. Tensors that overlap in
memory share one, so that they share memory at the receiver too; a view sends only what it covers.

Each tensor is described by dtype, flags, number of dimensions, device, storage and offset (in elements), then
its sizes, then its strides unless it is contiguous.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mpirpc._core.devices import HOST, DeviceMap, device_code, device_from_code
from mpirpc.errors import RemoteProtocolError, SerializationError

FRAME_BIT = 1 << 63
"""Set in a storage's size if it travels as a frame of its own, behind the head."""

CHEAP_SPAN = 4096
"""Bytes up to which a tensor with gaps is sent as it lies; so is one whose gaps are not larger than it."""

_REQUIRES_GRAD, _CONTIGUOUS, _WHOLE = 1, 2, 4
"""Tensor flags; WHOLE: contiguous, and the only tensor of its storage, from its first to its last byte."""

_DTYPE_NAMES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu uint16 uint32 uint64"
).split()
"""Position is the number on the wire: append only."""

_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES) if dtype is not None}

_FIXED = struct.Struct("<BBBBIq")
FIXED_NBYTES = _FIXED.size

_KNOWN = 16
_WITH_NUMBERS = [struct.Struct(f"{_FIXED.format}{count}q") for count in range(_KNOWN)]
"""By number of sizes and strides: a whole description."""


def has_dtype(dtype: torch.dtype) -> bool:
    """Say whether tensors of this dtype can travel as plain bytes."""
    return dtype in _DTYPE_CODES


def code_of(dtype: torch.dtype) -> int:
    """Return the number on the wire of a dtype that :func:`has_dtype` knows."""
    return _DTYPE_CODES[dtype]


# --- sending ---


class Laid(NamedTuple):
    """The tensors of a message, laid out.

    Attributes:
        sizes: Of each storage, in bytes, with FRAME_BIT if it has a frame.
        inline: The bytes of each storage that has none.
        frames: The others, as contiguous uint8 tensors on their memory.
        descriptions: Of each tensor.
    """

    sizes: list[int]
    inline: list[bytes]
    frames: list[torch.Tensor]
    descriptions: list[bytes]


# functions of C that do not give the interpreter up, as ctypes' own versions of them do
copy_from: Callable[[int, int], bytes] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t
)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
"""Return so many bytes from an address on."""

copy_into: Callable[[int, bytes | int, int], None] = ctypes.PYFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(("memmove", ctypes.PyDLL(None)))
"""Fill memory from an address on with so many bytes (or with those at another address)."""


def lay_out(tensors: Sequence[torch.Tensor], eager_limit: int, device_map: DeviceMap | None) -> Laid:
    """Plan what to send of ``tensors``: quickly if all are contiguous, on the host and apart from each other.

    Copies: small storages; large ones only if they have large gaps, or are on a device.
    """
    laid, spans = Laid([], [], [], []), []
    for place, tensor in enumerate(tensors):
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return _lay_out_any(tensors, eager_limit, device_map)
        address, nbytes, shape = tensor.data_ptr(), tensor.nbytes, tensor.shape
        if not address and nbytes:
            return _lay_out_any(tensors, eager_limit, device_map)
        spans.append((address, nbytes))
        if nbytes <= eager_limit:
            laid.inline.append(copy_from(address, nbytes))
            laid.sizes.append(nbytes)
        else:
            plain = tensor.detach() if tensor.requires_grad else tensor
            if not shape or plain.stride(-1) != 1:  # one element, or many along another dimension
                plain = plain.as_strided((plain.numel(),), (1,))
            laid.frames.append(plain.view(torch.uint8))
            laid.sizes.append(nbytes | FRAME_BIT)
        ndim, flags = len(shape), _CONTIGUOUS | _WHOLE | tensor.requires_grad
        if ndim < _KNOWN:
            code = _DTYPE_CODES[tensor.dtype]
            laid.descriptions.append(_WITH_NUMBERS[ndim].pack(code, flags, ndim, HOST, place, 0, *shape))
        else:
            laid.descriptions.append(_pack(tensor.dtype, flags, ndim, HOST, place, 0, shape))
    return laid if len(spans) < 2 or are_apart(spans) else _lay_out_any(tensors, eager_limit, device_map)


def are_apart(spans: list[tuple[int, int]]) -> bool:
    """Say whether no two ranges of memory, each an address and a size, overlap."""
    spans.sort()
    end = 0
    for address, nbytes in spans:
        if address < end:
            return False
        end = address + nbytes
    return True


def _lay_out_any(tensors: Sequence[torch.Tensor], eager_limit: int, device_map: DeviceMap | None) -> Laid:
    laid = Laid([], [], [], [b""] * len(tensors))
    for index, storage in enumerate(_plan_storages(tensors)):
        _add_storage(laid, storage.address, storage.nbytes, storage.tensors[0][1], eager_limit)
        for place, tensor in storage.tensors:
            code = device_code(tensors[place], device_map)
            laid.descriptions[place] = _describe(tensor, code, index, storage, tensors[place].requires_grad)
    return laid


def _add_storage(laid: Laid, address: int, nbytes: int, tensor: torch.Tensor, eager_limit: int) -> None:
    """Add a range of ``tensor``'s memory to what is sent."""
    if nbytes <= eager_limit:
        laid.inline.append(copy_from(address, nbytes))
        laid.sizes.append(nbytes)
        return
    memory = tensor.untyped_storage()
    frame = torch.empty(0, dtype=torch.uint8, device="cpu").set_(
        memory, address - memory.data_ptr(), (nbytes,), (1,)
    )
    laid.frames.append(frame)
    laid.sizes.append(nbytes | FRAME_BIT)


@dataclass(slots=True)
class _Storage:
    """A range of memory that goes on the wire, and the tensors in it with their place in the message."""

    address: int
    nbytes: int
    tensors: list[tuple[int, torch.Tensor]]


def _plan_storages(tensors: Sequence[torch.Tensor]) -> list[_Storage]:
    """Find the ranges of memory to send: one per group of tensors that overlap."""
    on_host = [_on_host(tensor) for tensor in tensors]
    order = sorted(range(len(on_host)), key=lambda place: on_host[place].data_ptr())
    groups: list[_Storage] = []
    for place in order:
        tensor = on_host[place]
        start, nbytes = tensor.data_ptr(), _span(tensor) * tensor.element_size()
        last = groups[-1] if groups else None
        overlaps = last is not None and nbytes and start < last.address + last.nbytes
        if last is not None and overlaps and _memory_of(tensor) == _memory_of(last.tensors[0][1]):
            last.nbytes = max(last.nbytes, start + nbytes - last.address)
            last.tensors.append((place, tensor))
        else:
            groups.append(_Storage(start, nbytes, [(place, tensor)]))
    return [_alone(group) if len(group.tensors) == 1 else _aligned(group) for group in groups]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it, that has its memory on the host.

    Raises:
        SerializationError: Its memory was given back.
    """
    if not tensor.is_cpu:
        return tensor.detach().cpu()
    if tensor.data_ptr() or not tensor.nbytes:
        return tensor
    if not tensor._is_zerotensor():  # zeros for which torch has taken no memory
        raise SerializationError("a tensor has no memory: its storage was resized to 0")
    return tensor.detach().clone()


def _alone(group: _Storage) -> _Storage:
    """Pack a tensor that is alone in its storage, if its gaps cost more than a copy."""
    place, tensor = group.tensors[0]
    if group.nbytes <= max(CHEAP_SPAN, 2 * tensor.nbytes):
        return group
    packed = tensor.detach().contiguous()
    return _Storage(packed.data_ptr(), packed.nbytes, [(place, packed)])


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
    offset = (tensor.data_ptr() - storage.address) // tensor.element_size() if tensor.numel() else 0
    flags, numbers = _REQUIRES_GRAD if requires_grad else 0, tuple(tensor.shape)
    if tensor.is_contiguous():
        flags |= _CONTIGUOUS | (_WHOLE if len(storage.tensors) == 1 else 0)
    else:
        numbers += tensor.stride()
    return _pack(tensor.dtype, flags, tensor.dim(), device, index, offset, numbers)


def _pack(
    dtype: torch.dtype, flags: int, ndim: int, device: int, index: int, offset: int, numbers: Sequence[int]
) -> bytes:
    count = len(numbers)
    layout = _WITH_NUMBERS[count] if count < _KNOWN else struct.Struct(f"{_FIXED.format}{count}q")
    return layout.pack(_DTYPE_CODES[dtype], flags, ndim, device, index, offset, *numbers)


# --- receiving ---


def rebuild(
    head: bytearray, at: int, num_tensors: int, sizes: Sequence[int], frames: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[bool], int]:
    """Rebuild the tensors of a message.

    Args:
        head: The message's head.
        at: Where the inline storages begin in it; the descriptions follow.
        num_tensors: How many there are.
        sizes: Of the storages, as sent.
        frames: Storages that came as frames.

    Returns:
        The tensors, whether each required grad at the sender, and where the descriptions end.

    Raises:
        RemoteProtocolError: The bytes do not fit; damaged ones make struct and torch complain, too.
    """
    storages = _Storages(head, at, sizes, frames)
    at = storages.end
    tensors: list[torch.Tensor] = []
    needs_grad: list[bool] = []
    for _ in range(num_tensors):
        flags, ndim = head[at + 1], head[at + 2]
        count = ndim if flags & _CONTIGUOUS else 2 * ndim
        layout = _WITH_NUMBERS[count] if count < _KNOWN else struct.Struct(f"{_FIXED.format}{count}q")
        code, _, _, device, index, offset, *numbers = layout.unpack_from(head, at)
        at += layout.size
        if flags & _WHOLE:
            tensor = storages.whole(index, code, tuple(numbers))
        else:
            tensor = storages.part(index, code, offset, numbers[:ndim], numbers[ndim:])
        tensors.append(tensor if device == HOST else tensor.to(device_from_code(device)))
        needs_grad.append(flags & _REQUIRES_GRAD != 0)
    return tensors, needs_grad, at


_PROTOTYPE_NBYTES, _NUM_PROTOTYPES = 1024, 256
_prototypes: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
"""Small tensors by dtype and shape: making another like one of them costs half of making it from scratch."""


def new_tensor(code: int, shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
    """Return a tensor in fresh memory, which must have ``nbytes``.

    Raises:
        RemoteProtocolError: It would not; no memory is taken. Or this torch has no such dtype.
    """
    prototype = _prototypes.get((code, shape))
    if prototype is not None and prototype.nbytes == nbytes:
        return torch.empty_like(prototype)
    dtype = _dtype_of(code)
    _check_nbytes(dtype, shape, nbytes)
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if nbytes <= _PROTOTYPE_NBYTES and len(_prototypes) < _NUM_PROTOTYPES:
        _prototypes[code, shape] = torch.empty_like(tensor)
    return tensor


def _check_nbytes(dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> None:
    if math.prod(shape) * dtype.itemsize != nbytes:
        raise RemoteProtocolError(f"a {dtype} tensor of shape {shape} came with {nbytes} bytes")


def has_code(code: int) -> bool:
    """Say whether this torch has tensors of the dtype with this code."""
    return 0 <= code < len(_DTYPES) and _DTYPES[code] is not None


def _dtype_of(code: int) -> torch.dtype:
    dtype = _DTYPES[code]
    if dtype is None:
        raise RemoteProtocolError(f"torch {torch.__version__} has no {_DTYPE_NAMES[code]} tensors")
    return dtype


class _Storages:
    """The storages of one arrived message, made into tensors' memory when first needed.

    Attributes:
        end: Where the inline ones end in the head.
    """

    __slots__ = ("_address", "_memory", "end")

    def __init__(
        self, head: bytearray, at: int, sizes: Sequence[int], frames: Sequence[torch.Tensor]
    ) -> None:
        self._memory: list[torch.Tensor | tuple[int, int]] = []  # a frame, or (offset in head, nbytes)
        num_frames = 0
        for size in sizes:
            if size & FRAME_BIT:
                self._memory.append(frames[num_frames])
                num_frames += 1
            else:
                self._memory.append((at, size))
                at += size
        if at > len(head):
            raise RemoteProtocolError(f"a message's tensors end at byte {at} of {len(head)}")
        self.end = at
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(head))

    def whole(self, index: int, code: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Make the tensor that has all of storage ``index``."""
        memory = self._memory[index]
        if type(memory) is not tuple:
            frame = self._materialize(index)
            _check_nbytes(_dtype_of(code), shape, frame.numel())
            storage = frame.untyped_storage()
            return new_tensor(code, (0,), 0).set_(storage, 0, shape, _contiguous_strides(shape))
        at, nbytes = memory
        tensor = new_tensor(code, shape, nbytes)
        copy_into(tensor.data_ptr(), self._address + at, nbytes)
        return tensor

    def part(
        self, index: int, code: int, offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Make a tensor that covers a part of storage ``index``; contiguous if no strides are given."""
        dtype = _dtype_of(code)
        strides = strides or _contiguous_strides(shape)
        storage = self._materialize(index).untyped_storage()
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        end = (last + 1) * dtype.itemsize
        if 0 not in shape and end > storage.nbytes():  # set_ would make the storage larger
            raise RemoteProtocolError(f"a tensor ends at byte {end} of {storage.nbytes()}")
        return new_tensor(code, (0,), 0).set_(storage, offset, shape, strides)

    def _materialize(self, index: int) -> torch.Tensor:
        memory = self._memory[index]
        if isinstance(memory, tuple):
            at, nbytes = memory
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            copy_into(memory.data_ptr(), self._address + at, nbytes)
            self._memory[index] = memory
        return memory


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
