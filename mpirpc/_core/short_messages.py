"""The layout of short messages: calls and responses of plain values and small tensors, which is most of them.

::

    (layout, kind, fields, what is flat, tensors)

written by ``marshal``; its mark of a tuple, ``(``, opens no other message. A tensor is (dtype, whether it
requires grad, shape, bytes). One call of ``marshal`` writes or reads all: less than half of what the general
layout of ``wire.py`` costs, which carries the rest (large tensors, views, tensors that share memory, RRefs,
anything pickled).

What follows the mark is trusted, as ``marshal`` is not made for damaged bytes: MPI delivers what was sent.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

import torch

from mpirpc._core.messages import Flat
from mpirpc._core.tensor_layout import are_apart, code_of, copy_from, copy_into, new_tensor
from mpirpc.errors import RemoteProtocolError

SHORT_MARK = ord("(")
"""Opens every short message."""

LAYOUT = 2
"""Version of what is above."""

_FORMAT = 2
"""Of marshal: later ones look for objects that occur twice, which takes as long as all the rest."""

Described = tuple[Any, ...]
"""A tensor in a message: dtype, whether it requires grad, shape, bytes."""


def write_short(kind: int, numbers: Sequence[int], flat: Flat, described: Sequence[Described]) -> bytes:
    """Lay a message out.   Copies: the tensors' bytes."""
    content: Any = LAYOUT, kind, numbers, flat, described
    return marshal.dumps(content, _FORMAT)


def describe(tensors: Sequence[torch.Tensor], eager_limit: int) -> tuple[Described, ...] | None:
    """Describe tensors; None if they are not small, contiguous, in host memory and apart.

    Copies: the tensors.
    """
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
    return marshal.dumps(flat, _FORMAT)


def read_short(head: bytearray) -> tuple[int, int, tuple[int, ...], Flat, Sequence[Described]]:
    """Read what :func:`write_short` has written: layout, kind, numbers, what is flat, tensors.

    Raises:
        RemoteProtocolError: It ends too early, or has another layout.
    """
    try:
        found: tuple[int, int, tuple[int, ...], Flat, Sequence[Described]] = marshal.loads(head)
    except (EOFError, ValueError, TypeError) as error:
        raise RemoteProtocolError(f"a short message of {len(head)} bytes cannot be read: {error}") from error
    if len(found) != 5 or found[0] != LAYOUT:
        raise RemoteProtocolError(
            f"a short message has the layout {found[:1]}, those of this version of mpirpc {LAYOUT}",
            "run the same version of mpirpc on every rank",
        )
    return found


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
