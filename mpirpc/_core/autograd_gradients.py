"""Gradients on the wire and in a context.

On the wire a recv's answer has one byte per tensor of the message that requires grad, saying how its gradient
travels. In a context a gradient is never changed in place by us, and no two entries share memory: users may
scale or clip them in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableMapping, Sequence

import torch

from mpirpc._core.messages import Body
from mpirpc._core.pickling import loads
from mpirpc.errors import RemoteProtocolError

_NONE, _DENSE, _SPARSE, _COALESCED = range(4)
"""One byte of an answer: no gradient; one tensor; three tensors (indices, values, size) of a COO tensor."""


def encode_gradients(gradients: Sequence[torch.Tensor | None]) -> Body:
    """Put the gradients of one recv's tensors into a body.

    Copies: only those that are neither contiguous nor sparse.
    """
    kinds = bytearray()
    tensors: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient is None:
            kinds.append(_NONE)
        elif gradient.layout is torch.sparse_coo:
            kinds.append(_COALESCED if gradient.is_coalesced() else _SPARSE)
            tensors += [gradient._indices(), gradient._values(), torch.tensor(gradient.shape, device="cpu")]
        else:
            kinds.append(_DENSE)
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            tensors.append(dense.contiguous())
    return Body(tensors=tensors, flat=(None, (bytes(kinds),), (), ()))


def decode_gradients(source: int, body: Body) -> list[torch.Tensor | None]:
    """Take the gradients out of the body of a message from ``source``.

    Raises:
        RpcError: The body is not what :func:`encode_gradients` makes.

    Copies: none.
    """
    tensors = iter(body.tensors)
    gradients: list[torch.Tensor | None] = []
    try:
        for kind in loads(body, ()):
            if kind == _NONE:
                gradients.append(None)
            elif kind == _DENSE:
                gradients.append(next(tensors))
            else:
                gradients.append(_sparse(next(tensors), next(tensors), next(tensors), kind == _COALESCED))
    except StopIteration:
        raise RemoteProtocolError(
            f"a gradient from rank {source} announces more tensors than the {len(body.tensors)} it has"
        ) from None
    return gradients


def _sparse(indices: torch.Tensor, values: torch.Tensor, size: torch.Tensor, coalesced: bool) -> torch.Tensor:
    shape = size.tolist()
    return torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, is_coalesced=coalesced, check_invariants=False
    )


def storage_key(gradient: torch.Tensor) -> int:
    """Name of the memory that ``gradient`` lies in."""
    values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
    return values.untyped_storage().data_ptr()


def accumulate(
    gradients: MutableMapping[torch.Tensor, torch.Tensor],
    found: Iterable[tuple[torch.Tensor, torch.Tensor]],
    taken: set[int],
) -> None:
    """Add the gradients a run found to those of a context.

    Args:
        gradients: The context's: leaf -> gradient.
        found: Leaf and gradient.
        taken: Memory that others look at (answers on their way, gradients taken before); grows.

    Copies: a gradient whose memory somebody else has, or that is laid out otherwise than its leaf. Else none.
    """
    pairs = list(found)
    keys = [storage_key(gradient) for _, gradient in pairs]
    uses = Counter(keys)
    for (leaf, gradient), key in zip(pairs, keys, strict=True):
        known = gradients.get(leaf)
        if known is not None:
            gradients[leaf] = add(known, gradient)
        elif key in taken or uses[key] > 1 or not _fits(leaf, gradient):
            gradients[leaf] = _copy(gradient)
        else:
            gradients[leaf] = gradient
            taken.add(key)


def add(known: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Sum in new memory: the old one may be in the user's hands. Dense + sparse is the order torch can do."""
    if known.layout is not torch.strided and gradient.layout is torch.strided:
        return gradient + known
    return known + gradient


def _fits(leaf: torch.Tensor, gradient: torch.Tensor) -> bool:
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    return gradient.is_contiguous() or (leaf.layout is torch.strided and gradient.stride() == leaf.stride())


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """Copy without gaps; for sparse tensors ``clone`` knows no other form."""
    if gradient.layout is torch.strided:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.clone()
