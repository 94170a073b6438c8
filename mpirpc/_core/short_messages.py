"""The layout of short messages: calls and responses of plain values and small tensors, which is most of them.

::

    magic      two bytes
    content    marshal of (kind, fields, function, values, places of tensors among them, tensors)

A tensor is (dtype, whether it requires grad, shape, bytes). One call of ``marshal`` writes or reads all: less
than half of what the general layout of ``wire.py`` costs, which carries the rest (large tensors, views,
tensors that share memory, RRefs, anything pickled).

What follows the magic is trusted, as ``marshal`` is not made for damaged bytes: MPI delivers what was sent.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

import torch

from mpirpc._core.messages import Flat
from mpirpc._core.tensor_layout import are_apart, code_of, copy_from, copy_into, new_tensor
from mpirpc.errors import RemoteProtocolError

SHORT_MAGIC = b"\x01\x53"
"""Opens every short message; the first byte is the version of this layout."""

_VERSION = 4
"""Of marshal's format."""

Described = tuple[Any, ...]
"""A tensor in a message: dtype, whether it requires grad, shape, bytes."""


def write_short(
    kind: int, numbers: Sequence[int], flat: Flat, tensors: Sequence[torch.Tensor], eager_limit: int
) -> bytes | None:
    """Lay a message out; None if its tensors are not small, contiguous, in host memory and apart.

    Copies: the tensors, twice.
    """
    described: tuple[Described, ...] | None = ()
    if tensors:
        described = _describe(tensors, eager_limit)
        if described is None:
            return None
    name, values, lifted, _ = flat
    content: Any = kind, numbers, name, values, lifted, described
    return SHORT_MAGIC + marshal.dumps(content, _VERSION)


def _describe(tensors: Sequence[torch.Tensor], eager_limit: int) -> tuple[Described, ...] | None:
    described: list[Described] = []
    spans: list[tuple[int, int]] = []
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes > eager_limit or not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        address = tensor.data_ptr()
        if not address and nbytes:
            return None
        spans.append((address, nbytes))
        described.append(
            (code_of(tensor.dtype), tensor.requires_grad, tuple(tensor.shape), copy_from(address, nbytes))
        )
    return tuple(described) if len(spans) < 2 or are_apart(spans) else None


def flat_payload(flat: Flat) -> bytes:
    """Write something flat as the payload of a general message, which then begins with ``(``."""
    return marshal.dumps(flat, 2)


def read_short(head: bytearray) -> tuple[int, tuple[int, ...], Flat, Sequence[Described]]:
    """Read what :func:`write_short` has written: kind, numbers, what is flat, tensors.

    Raises:
        RemoteProtocolError: It ends too early.
    """
    try:
        kind, numbers, name, values, lifted, described = marshal.loads(memoryview(head)[2:])
    except (EOFError, ValueError, TypeError) as error:
        raise RemoteProtocolError(f"a short message of {len(head)} bytes cannot be read: {error}") from error
    return kind, numbers, (name, values, lifted, ()), described


def rebuild_short(described: Sequence[Described]) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the tensors, and whether each required grad at the sender.   Copies: once more."""
    tensors: list[Any] = []
    needs_grad: list[bool] = []
    for code, needs, shape, data in described:
        tensor = new_tensor(code, shape, len(data))
        copy_into(tensor.data_ptr(), data, len(data))
        tensors.append(tensor)
        needs_grad.append(needs)
    return tensors, needs_grad
