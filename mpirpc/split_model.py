"""Split models: an ``nn.Module`` with remote modules among its submodules, at any depth.

The functions here treat it as the plain model that it stands for: the same parameters in the same order, the
same keys in its state dict. Its submodules on other workers are *remote parts*; ``mpirpc.nn`` makes them.

Rules for this file: public API only. torch's own ``state_dict`` walks the model, so whatever modules do there
(hooks, extra state, versions) is done; all remote parts are asked at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mpirpc.api import rpc_async
from mpirpc.moving import moved
from mpirpc.rref import RRef

__all__ = [
    "LoadedKeys",
    "RemotePart",
    "StateDict",
    "full_parameters",
    "full_state_dict",
    "load_full_state_dict",
    "start_at_owner",
]

_T = TypeVar("_T")

StateDict = Mapping[str, Any]
"""As ``nn.Module.state_dict`` returns it: tensors by dotted name."""


class LoadedKeys(NamedTuple):
    """What a state dict and a model did not have in common; both are empty after a strict load."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class RemotePart(nn.Module):
    """A module of a model that lives elsewhere: a handle with no parameters of its own.

    Attributes:
        module_rref: RRef to the module.
    """

    module_rref: RRef[nn.Module]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: no RPC is made behind the back of ``state_dict()``. Use :func:`full_state_dict`.

        Raises:
            ValueError: Always, but for :func:`full_state_dict`, which comes through here.
        """
        parts = kwargs.get("destination")
        if not isinstance(parts, _Parts):
            raise ValueError(
                "Method ``state_dict`` not supported for RemoteModule. Please use ``remote_state_dict`` "
                "instead, or ``full_state_dict`` for a whole model."
            )
        parts[kwargs.get("prefix", "")] = self
        return parts


def start_at_owner(
    module_rref: RRef[nn.Module], function: Callable[..., _T], *args: Any
) -> torch.futures.Future[_T]:
    """Start a call of ``function(module_rref, *args)`` where the module lives.

    Thread: any.   Progress: never blocks.
    """
    return rpc_async(module_rref.owner(), function, args=(module_rref, *args))


# --- for programs ---


def full_parameters(module: nn.Module) -> list[RRef[nn.Parameter]]:
    """Return RRefs to all parameters of a split model, for ``DistributedOptimizer``.

    In the order of ``parameters()`` of the plain model, so that the optimizer's state fits that too; each
    parameter here once.

    Args:
        module: A model whose submodules may be RemoteModules, or a RemoteModule.

    Thread: any.   Progress: waits for remote progress.
    """
    found: list[nn.Parameter | torch.futures.Future[list[RRef[nn.Parameter]]]] = list(_parameters(module))
    own = {id(item): RRef(item) for item in found if isinstance(item, nn.Parameter)}
    parts: list[list[RRef[nn.Parameter]]] = []
    for item in found:
        parts.append([own.pop(id(item))] if id(item) in own else [])
        if not isinstance(item, nn.Parameter):
            parts.append(item.wait())
    return [rref for part in parts for rref in part]


def _parameters(
    module: nn.Module,
) -> Iterator[nn.Parameter | torch.futures.Future[list[RRef[nn.Parameter]]]]:
    """Yield a model's parameters in order; for a RemoteModule a future of RRefs to its."""
    if isinstance(module, RemotePart):
        yield start_at_owner(module.module_rref, _parameters_here)
        return
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _parameters(child)


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Gather the state of a split model into one dict, with the keys that the plain model would have.

    So the result can be stored by ``torch.save``, loaded by :func:`load_full_state_dict` into a model split
    in any other way, or by ``load_state_dict`` into the model made of plain modules. Remote parts are fetched
    all at once. Nothing keeps others from training the model meanwhile.

    Args:
        module: A model whose submodules may be RemoteModules, or a RemoteModule.

    Returns:
        As ``nn.Module.state_dict``. Tensors of modules here are those of the module itself, as there; those
        of remote modules are copies on the CPU.

    Raises:
        Exception: What an owner raised.

    Thread: any.   Progress: waits for remote progress.   Copies: remote parts once, by the network.
    """
    return _gather(module, _state_here)


def load_full_state_dict(module: nn.Module, state_dict: StateDict, strict: bool = True) -> LoadedKeys:
    """Copy a state dict into a split model: each owner gets what belongs to its part.

    Keys and shapes are compared first, on all owners. Parameters stay the same objects, so optimizers stay
    valid. Hooks of modules that rename keys while they load come too late for the comparison: give
    ``strict=False`` to those.

    Args:
        module: A model whose submodules may be RemoteModules, or a RemoteModule.
        state_dict: From :func:`full_state_dict`, or from ``state_dict()`` of the plain model.
        strict: Refuse a state dict with keys too few or too many.

    Returns:
        The keys that were missing and those that nothing here wants.

    Raises:
        RuntimeError: It does not fit; all that differs is listed, and nothing was changed.
        Exception: What an owner raised.

    Thread: any.   Progress: waits for remote progress.   Copies: remote parts once, by the network.
    """
    shapes = {key: _shape_of(value) for key, value in _gather(module, _shapes_here).items()}
    loaded = LoadedKeys(
        [key for key in shapes if key not in state_dict], [key for key in state_dict if key not in shapes]
    )
    _check_fits(type(module).__name__, shapes, state_dict, loaded if strict else LoadedKeys([], []))
    _scatter(module, state_dict)
    return loaded


# --- a state dict in parts ---


class _Parts(OrderedDict[str, Any]):
    """A state dict under way: where a remote part stands it holds that part, by its prefix.

    A prefix is empty or ends with a dot, as no key of a state dict does.
    """

    _metadata: OrderedDict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self._metadata = OrderedDict()

    def remotes(self) -> dict[str, RemotePart]:
        """Return the remote parts by their prefix, such as ``"net.0."``."""
        return {key: value for key, value in self.items() if isinstance(value, RemotePart)}


def _gather(
    module: nn.Module, look: Callable[[RRef[nn.Module]], OrderedDict[str, Any]]
) -> OrderedDict[str, Any]:
    """Make a model's state dict, with what ``look`` returns at the owners for the parts there."""
    parts = _Parts()
    module.state_dict(destination=parts)
    answers = _wait_for_all(
        {prefix: start_at_owner(remote.module_rref, look) for prefix, remote in parts.remotes().items()}
    )
    state: OrderedDict[str, Any] = OrderedDict()
    metadata = OrderedDict(parts._metadata)
    for key, value in parts.items():
        if key not in answers:
            state[key] = value
            continue
        for name, part in answers[key].items():
            state[key + name] = part
        for name, about in getattr(answers[key], "_metadata", {}).items():
            metadata[(key + name).rstrip(".")] = about
    state._metadata = metadata  # type: ignore[attr-defined]  # where torch keeps the versions of modules
    return state


def _scatter(module: nn.Module, state_dict: StateDict) -> None:
    """Load a state dict that is known to fit."""
    parts = _Parts()
    module.state_dict(destination=parts)
    remotes = parts.remotes()
    loads = {
        prefix: start_at_owner(remote.module_rref, _load_here, _on_cpu(_below(state_dict, prefix)))
        for prefix, remote in remotes.items()
    }
    if not isinstance(module, RemotePart):
        here = _below(state_dict, "")
        for key in [key for key in here if key.startswith(tuple(remotes))]:
            del here[key]
        module.load_state_dict(here, strict=False)
    _wait_for_all(loads)


def _below(state_dict: StateDict, prefix: str) -> OrderedDict[str, Any]:
    """Return the part of a state dict under a prefix, without it."""
    part = OrderedDict(
        (key[len(prefix) :], value) for key, value in state_dict.items() if key.startswith(prefix)
    )
    metadata: Mapping[str, Any] = getattr(state_dict, "_metadata", {})
    part._metadata = OrderedDict(  # type: ignore[attr-defined]
        (key[len(prefix) :], about) for key, about in metadata.items() if f"{key}.".startswith(prefix)
    )
    return part


def _on_cpu(state: OrderedDict[str, Any]) -> OrderedDict[str, Any]:
    """Move the tensors of a state dict in place, ready to travel.   Copies: those that are elsewhere."""
    for key, value in state.items():
        state[key] = moved(value, "cpu")
    return state


def _wait_for_all(futures: Mapping[str, torch.futures.Future[_T]]) -> dict[str, _T]:
    """Wait for all, also when one fails; then raise the first error."""
    results, errors = {}, []
    for key, future in futures.items():
        try:
            results[key] = future.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class _Shape(tuple[int, ...]):
    """Stands for a tensor of an owner's state dict."""


def _shape_of(value: Any) -> _Shape | None:
    """Return the shape of a tensor; None for other things, and for parameters that have none yet."""
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        return _Shape(value.shape)
    return value if isinstance(value, _Shape) else None


def _check_fits(
    name: str, shapes: Mapping[str, _Shape | None], state_dict: StateDict, faulty: LoadedKeys
) -> None:
    """Raise, in the words of ``nn.Module.load_state_dict``, if a state dict does not fit a model."""
    faults = []
    if faulty.unexpected_keys:
        faults.append("Unexpected key(s) in state_dict: " + _quoted(faulty.unexpected_keys))
    if faulty.missing_keys:
        faults.append("Missing key(s) in state_dict: " + _quoted(faulty.missing_keys))
    for key, shape in shapes.items():
        given = _shape_of(state_dict.get(key))
        if shape is not None and given is not None and given != shape:
            faults.append(
                f"size mismatch for {key}: the state has {tuple(given)}, the model has {tuple(shape)}"
            )
    if faults:
        lines = "".join(f"\n\t{fault}." for fault in faults)
        raise RuntimeError(f"Error(s) in loading state_dict for {name}:{lines}")


def _quoted(keys: Iterable[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys)


# --- at the owner ---


def _parameters_here(module_rref: RRef[nn.Module]) -> list[RRef[nn.Parameter]]:
    return full_parameters(module_rref.local_value())


def _state_here(module_rref: RRef[nn.Module]) -> OrderedDict[str, Any]:
    return _on_cpu(_gather(module_rref.local_value(), _state_here))


def _shapes_here(module_rref: RRef[nn.Module]) -> OrderedDict[str, Any]:
    state = _gather(module_rref.local_value(), _shapes_here)
    for key, value in state.items():
        state[key] = _shape_of(value)
    return state


def _load_here(module_rref: RRef[nn.Module], state_dict: OrderedDict[str, Any]) -> None:
    _scatter(module_rref.local_value(), state_dict)
