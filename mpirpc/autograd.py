"""Distributed autograd: gradients through calls.

Inside ``with context() as context_id:`` every call that carries tensors requiring grad is recorded on both
sides; ``backward`` then runs through all workers that took part and leaves the gradients in the context, one
dict per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from mpirpc._core.autograd_engine import AutogradEngine
from mpirpc._core.current import get_current
from mpirpc.rref import UNSET_TIMEOUT, check_timeout

__all__ = ["backward", "context", "get_gradients"]


class context:
    """A record of one forward and backward pass over several workers.

    Entering makes it current on this thread and returns its id; calls made inside carry it to the workers
    they reach. Leaving frees it on all of them.

    Raises:
        AutogradError: This thread is in a context already.
        NotInitializedError: RPC does not run.
    """

    _engine: AutogradEngine
    _context_id: int

    def __enter__(self) -> int:
        self._engine = get_current().autograd
        self._context_id = self._engine.new_context()
        return self._context_id

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.current_context_id = 0
        self._engine.release_context(self._context_id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    timeout: float = UNSET_TIMEOUT,
) -> None:
    """Compute the gradients of the sum of ``roots`` for every leaf that took part, on every worker.

    Gradients are added up in the context, not in ``.grad``; read them with ``get_gradients`` on the worker
    where the leaf lives. First derivatives only: there is no ``create_graph``.

    A pass that fails, or is not over in time, ends on all workers that can be reached; what comes of it later
    is dropped. Gradients that it has added by then stay in the context. Hooks and functions that run on this
    worker are not broken off, on this thread the limit is looked at after them.

    Args:
        context_id: Of a living context, as given by ``with context() as context_id``.
        roots: Scalar tensors of this worker that require grad.
        retain_graph: Keep the graphs for another backward pass in this context.
        timeout: Limit of the whole pass in seconds; 0 means none; unset, the group's default.

    Raises:
        AutogradError: The context is unknown, or a root is not a scalar that requires grad.
        RpcTimeoutError: The pass was not over in time; the message names the workers that did not answer.
        Exception: What failed on any worker; its text names the worker.

    Thread: any.   Progress: drives it.
    """
    runtime = get_current()
    engine: AutogradEngine = runtime.autograd
    engine.backward(context_id, roots, retain_graph, check_timeout(timeout, runtime.options.rpc_timeout))


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients of this worker's leaves in the context, by leaf.

    They have no history: what is computed from them cannot be differentiated through them.

    Raises:
        AutogradError: The context is unknown on this worker.
    """
    engine: AutogradEngine = get_current().autograd
    return engine.get_gradients(context_id)
