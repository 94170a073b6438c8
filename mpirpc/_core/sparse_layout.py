"""Sparse COO tensors of a message <-> the dense ones they consist of.

A message that carries sparse tensors holds, in the place of each, its indices and its values, and at the end
one more tensor, the *recipe*: for every tensor of the message 0 if it is dense, else its kind, its number of
dimensions and its sizes, as int64. Copies: none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpirpc.errors import RemoteProtocolError

_SPARSE, _COALESCED, _NEEDS_GRAD = 1, 2, 4
"""Bits of a sparse tensor's kind."""


def has_sparse(tensors: Sequence[torch.Tensor]) -> bool:
    """Say whether any of ``tensors`` is sparse."""
    for tensor in tensors:  # a loop: half the cost of any()
        if tensor.layout is not torch.strided:
            return True
    return False


def split(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the dense tensors that stand for ``tensors``, the recipe last."""
    parts: list[torch.Tensor] = []
    recipe: list[int] = []
    for tensor in tensors:
        if tensor.layout is torch.strided:
            parts.append(tensor)
            recipe.append(0)
            continue
        plain = tensor.detach()
        parts += [plain._indices(), plain._values()]
        kind = _SPARSE | (_COALESCED if tensor.is_coalesced() else 0)
        recipe += [kind | (_NEEDS_GRAD if tensor.requires_grad else 0), tensor.dim(), *tensor.shape]
    return [*parts, torch.tensor(recipe, dtype=torch.int64, device="cpu")]


def join(parts: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[list[torch.Tensor], list[bool]]:
    """Rebuild what :func:`split` took apart, and say for each tensor whether it required grad.

    Raises:
        RemoteProtocolError: The parts do not fit the recipe.
    """
    recipe = iter(parts[-1].tolist())
    dense = iter(zip(parts[:-1], needs_grad[:-1], strict=True))
    tensors: list[torch.Tensor] = []
    grads: list[bool] = []
    try:
        for kind in recipe:
            part, needs = next(dense)
            if kind:
                shape = [next(recipe) for _ in range(next(recipe))]
                values, _ = next(dense)
                part = torch.sparse_coo_tensor(
                    part,
                    values,
                    shape,
                    device=values.device,
                    is_coalesced=bool(kind & _COALESCED),
                    check_invariants=False,
                )
                needs = bool(kind & _NEEDS_GRAD)
            tensors.append(part)
            grads.append(needs)
    except (StopIteration, RuntimeError) as error:
        raise RemoteProtocolError(f"sparse tensors of a message do not fit its recipe: {error}") from error
    return tensors, grads
