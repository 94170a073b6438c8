"""Checks of ``backward``'s arguments; the texts are torch's where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mpirpc.errors import AutogradError

_NO_HISTORY = (
    "nothing that requires grad went into it; gradients from get_gradients have no history: distributed "
    "autograd computes first derivatives only, so compute an inner derivative inside one function, on the "
    "worker that is called"
)


def check_types(context_id: Any, roots: Any) -> None:
    """Raise TypeError for what is no context id, and no list of tensors."""
    if not isinstance(context_id, int):
        raise TypeError(
            f"backward(): incompatible function arguments: context_id={context_id!r} is not an int"
        )
    if not isinstance(roots, (list, tuple)):
        raise TypeError(
            f"backward(): incompatible function arguments: roots={roots!r} is not a list of tensors"
        )
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                f"backward(): incompatible function arguments: {type(root).__name__} in roots is not a tensor"
            )


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raise AutogradError for tensors that backward cannot begin with."""
    if not roots:
        raise AutogradError("No tensors provided for gradient computation.")
    for position, root in enumerate(roots):
        problem = next(_problems(root), "")
        if problem:
            hint = "" if root.requires_grad else _NO_HISTORY
            raise AutogradError(f"roots[{position}] (shape {tuple(root.shape)}): {problem}", hint)


def _problems(root: torch.Tensor) -> Iterator[str]:
    if not root.requires_grad:
        yield "requires_grad not set on this root"
    if root.numel() != 1:
        yield "this root is not a scalar, all roots need to be scalar"
    if root.grad_fn is None:
        yield "this root does not have a valid gradient function: it is a leaf, nothing was computed"
    if root.is_complex():
        yield "gradients can be created only for real scalars"
