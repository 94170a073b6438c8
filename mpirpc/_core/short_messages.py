"""The layout of short messages: calls and responses of plain values and tensors, which is most of them.

::

    (layout, kind, fields, what is flat, tensors)
    (layout, kind, fields, what is flat, tensors, True)

written by ``marshal``; its mark of a tuple, ``(``, opens no other message. A tensor is (dtype, whether it
requires grad, shape, bytes); of a large one, which follows as a frame, the number of bytes: a message with
frames has a sixth item, so that its second byte tells. One call of ``marshal`` writes or reads all: less than
half of what the general layout of ``wire.py`` costs, which carries the rest (tensors with gaps, on devices or
sharing memory, RRefs, anything pickled). A large tensor leaves from where it lies and is received where it
stays: no operator of torch has to run but the one that makes it.

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

SHORT_MARK = b"("
"""Opens every short message."""

LONE = b"(\x05"
"""Opens every short message without frames: marshal's mark, and the number of items."""

LAYOUT = 3
"""Version of what is above."""

_FORMAT = 2
"""Of marshal: later ones look for objects that occur twice, which takes as long as all the rest."""

Described = tuple[Any, ...]
"""A tensor in a message: dtype, whether it requires grad, shape, bytes or their number."""

NO_TENSORS: tuple[tuple[Described, ...], Sequence[torch.Tensor]] = (), ()
"""What :func:`describe` returns for no tensors."""


def write_short(
    kind: int, numbers: Sequence[int], flat: Flat, described: Sequence[Described], has_frames: bool
) -> bytes:
    """Lay a message out.   Copies: the small tensors' bytes."""
    content: Any = LAYOUT, kind, numbers, flat, described
    return marshal.dumps((*content, True) if has_frames else content, _FORMAT)


def describe(
    tensors: Sequence[torch.Tensor], eager_limit: int
) -> tuple[tuple[Described, ...], Sequence[torch.Tensor]] | None:
    """Describe tensors, and return those that travel as frames; None if some have gaps or share memory.

    The frames are tensors of their own on the same memory: whatever becomes of the user's, it stays.

    Copies: those up to ``eager_limit`` bytes.
    """
    described: list[Described] = []
    frames: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.is_contiguous()):
            return None
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        if not address and nbytes:
            return None
        spans.append((address, nbytes))
        data: bytes | int = nbytes
        if nbytes <= eager_limit:
            data = copy_from(address, nbytes)
        else:
            frames.append(tensor.detach())
        described.append((code_of(tensor.dtype), tensor.requires_grad, tuple(tensor.shape), data))
    return (tuple(described), frames) if len(spans) < 2 or are_apart(spans) else None


def flat_payload(flat: Flat) -> bytes:
    """Write something flat as the payload of a general message, which then begins with ``(``."""
    return marshal.dumps(flat, _FORMAT)


def read_short(head: bytearray) -> tuple[int, int, tuple[int, ...], Flat, Sequence[Described]]:
    """Read what :func:`write_short` has written: layout, kind, numbers, what is flat, tensors.

    Raises:
        RemoteProtocolError: It ends too early, or has another layout.
    """
    try:
        found: tuple[int, int, tuple[int, ...], Flat, Sequence[Described]] = marshal.loads(head)[:5]
    except (EOFError, ValueError, TypeError) as error:
        raise RemoteProtocolError(f"a short message of {len(head)} bytes cannot be read: {error}") from error
    if len(found) != 5 or found[0] != LAYOUT:
        raise RemoteProtocolError(
            f"a short message has the layout {found[:1]}, those of this version of mpirpc {LAYOUT}",
            "run the same version of mpirpc on every rank",
        )
    return found


def frames_of_short(head: bytearray) -> list[tuple[int, tuple[int, ...], int]]:
    """Return dtype, shape and bytes of each frame that follows.

    Raises:
        RemoteProtocolError: The message cannot be read.
    """
    if head.startswith(LONE):
        return []
    try:
        return [(code, shape, data) for code, _, shape, data in read_short(head)[4] if type(data) is int]
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"a short message does not list its tensors: {error}") from error


def rebuild_short(
    described: Sequence[Described], frames: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[bool]]:
    """Return the tensors, and whether each required grad at the sender.   Copies: small ones once more.

    Args:
        described: As :func:`read_short` returned it.
        frames: Those that came, with their dtypes and shapes.

    Raises:
        RemoteProtocolError: Something does not fit.
    """
    tensors: list[Any] = []
    needs_grad: list[bool] = []
    left = iter(frames)
    for code, needs, shape, data in described:
        if type(data) is int:
            tensor = next(left)
            if tensor.shape != shape or code_of(tensor.dtype) != code:
                raise RemoteProtocolError(
                    f"a frame of {tensor.dtype} and {tuple(tensor.shape)} is not {shape}"
                )
        else:
            tensor = new_tensor(code, shape, len(data))
            copy_into(tensor.data_ptr(), data, len(data))
        tensors.append(tensor)
        needs_grad.append(needs)
    return tensors, needs_grad
