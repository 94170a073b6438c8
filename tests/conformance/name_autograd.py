"""torch's private names about distributed autograd: contexts and their send and recv functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import mpirpc
from mpirpc._core.autograd_context import AutogradContext
from mpirpc._core.current import get_current
from mpirpc.errors import AutogradError
from tests.conformance.facades import Facade


def add(facades: Mapping[str, Facade]) -> None:
    """Add these names."""
    facades["torch.distributed.autograd"].extras.update(
        _init=lambda worker_id: None,
        backward=_backward,
        _retrieve_context=lambda context_id: _Context(get_current().autograd.retrieve(context_id)),
        _current_context=_current_context,
        _new_context=lambda: _Context(get_current().autograd.retrieve(get_current().autograd.new_context())),
        _release_context=lambda context_id: get_current().autograd.release_context(context_id),
        _get_max_id=lambda: get_current().autograd.max_id,
        _get_debug_info=_get_debug_info,
        DistAutogradContext=_Context,
    )


class _Context:
    """A context's record, as torch shows it."""

    def __init__(self, record: AutogradContext) -> None:
        self._record = record

    def _context_id(self) -> int:
        return self._record.context_id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self._record.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return {message_id: recv.node for message_id, recv in self._record.recvs.items()}

    def _known_worker_ids(self) -> set[int]:
        return set(self._record.known_workers)


def _backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Run backward; what failed is told in torch's words, which hide the exception's type."""
    try:
        mpirpc.autograd.backward(context_id, roots, retain_graph)
    except (RuntimeError, TypeError):
        raise
    except Exception as error:
        raise RuntimeError(f"Error on Node {mpirpc.get_worker_info().id}: {error}") from error


def _current_context() -> _Context:
    engine = get_current().autograd
    if not engine.current_context_id:
        raise AutogradError("this thread is in no autograd context")
    return _Context(engine.retrieve(engine.current_context_id))


def _get_debug_info() -> dict[str, str]:
    info = mpirpc.debug_info()
    return {
        "num_autograd_contexts": str(info["autograd_contexts"]),
        "num_current_backward_passes": str(info["autograd_passes"]),
    }
