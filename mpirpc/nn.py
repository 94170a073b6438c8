"""``RemoteModule``: an ``nn.Module`` that lives on another worker and is called as if it were here.

The module itself is the value of an RRef; a ``RemoteModule`` is a handle to it and can be sent by RPC as the
RRef can. A model with RemoteModules among its submodules is a *split model*: ``mpirpc/split_model.py``.

Rules for this file: public API only. What runs at the caller comes first, what runs at the owner second.
Methods of ``nn.Module`` that cannot keep their promise through a handle are refused by table
(:data:`_INSTEAD`), never done by halves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from mpirpc.api import WorkerInfo, get_worker_info, remote, rpc_async, rpc_sync
from mpirpc.errors import RRefError, UnknownWorkerError
from mpirpc.moving import moved
from mpirpc.rref import RRef
from mpirpc.split_model import (
    LoadedKeys,
    RemotePart,
    StateDict,
    full_parameters,
    full_state_dict,
    load_full_state_dict,
    start_at_owner,
)

__all__ = ["LoadedKeys", "RemoteModule", "full_parameters", "full_state_dict", "load_full_state_dict"]

_Self = TypeVar("_Self", bound="RemoteModule")


# --- at the caller ---


class RemoteModule(RemotePart):
    """Create an ``nn.Module`` on another worker and call it from here.

    The constructor does not wait: an error of ``module_cls`` is raised by the first use. Inside an autograd
    context a call records what the backward pass needs. Sent by RPC, the handle arrives as a handle to the
    same module; pickling it in any other way is refused. Methods of ``nn.Module`` that would need the module
    here (``parameters``, ``state_dict``, ``to``, ...) raise ``ValueError`` and name what to do instead.

    Args:
        remote_device: Worker and device: ``"worker1/cuda:0"``, ``"rank:1/cpu"`` or ``"1/cpu"``. Without a
            device (``"worker1"``) it is the CPU; without a worker (``"cuda:0"``), this worker. A rank or a
            ``WorkerInfo`` is taken too.
        module_cls: Subclass of ``nn.Module``, or a function that returns a module; it travels by name.
        args: Positional arguments of ``module_cls``.
        kwargs: Keyword arguments of ``module_cls``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``remote_device`` cannot be read, or ``module_cls`` makes no module.
        UnknownWorkerError: There is no such worker.

    Attributes:
        on: Name of the worker that owns the module.
        device: The module's device there.
        module_rref: RRef to the module.

    Thread: any.   Progress: never blocks.

    Example::

        layer = RemoteModule("worker1/cpu", nn.Linear, args=(20, 30))
        output = layer(torch.randn(128, 20))
    """

    on: str
    device: str

    def __init__(
        self,
        remote_device: str | int | WorkerInfo,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check_constructor_arguments(module_cls, args, kwargs)
        owner, device = _parse_remote_device(remote_device)
        call = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        self._attach(owner, device, remote(owner, _create_module, args=call))

    def _attach(self, owner: WorkerInfo, device: str, module_rref: RRef[nn.Module]) -> None:
        self.on = owner.name
        self.device = device
        self.module_rref = module_rref

    @staticmethod
    def init_from_module_rref(
        remote_device: str | int | WorkerInfo, module_rref: RRef[nn.Module]
    ) -> RemoteModule:
        """Make a handle to a module that exists already, given an RRef to it.

        Args:
            remote_device: As in the constructor. Its device says where inputs go; calls go to the RRef's
                owner, whichever worker is named here.
            module_rref: RRef to an ``nn.Module``.

        Raises:
            TypeError: ``module_rref`` is no RRef.
            ValueError: ``remote_device`` cannot be read.

        Thread: any.   Progress: never blocks.
        """
        if not isinstance(module_rref, RRef):
            raise TypeError(f"module_rref must be an RRef to an nn.Module, not {type(module_rref).__name__}")
        _, device = _parse_remote_device(remote_device)
        return _rebuild(RemoteModule, device, module_rref)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module at its owner and wait for the result.

        Args:
            args: Arguments of the module's ``forward``. With a device other than the CPU, tensors in them
                (also in lists, tuples and dicts) are moved to it, and tensors of the result back to the CPU.
            kwargs: Its keyword arguments.

        Raises:
            Exception: What the module's constructor or ``forward`` raised.

        Thread: any.   Progress: waits for remote progress.
        """
        return rpc_sync(self.module_rref.owner(), _run_forward, args=self._forward_call(args, kwargs))

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Start :meth:`forward` and return a future of its result.

        Thread: any.   Progress: never blocks.
        """
        return rpc_async(self.module_rref.owner(), _run_forward, args=self._forward_call(args, kwargs))

    def _forward_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        return self.module_rref, self.device, args, kwargs

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Return RRefs to the module's parameters, as ``DistributedOptimizer`` takes them.

        Args:
            recurse: With those of submodules; else the module's own only.

        Thread: any.   Progress: waits for remote progress.
        """
        return self.remote_parameters_async(recurse).wait()

    def remote_parameters_async(self, recurse: bool = True) -> torch.futures.Future[list[RRef[nn.Parameter]]]:
        """Start :meth:`remote_parameters` and return a future of its result.

        Thread: any.   Progress: never blocks.
        """
        return start_at_owner(self.module_rref, _parameter_rrefs, recurse)

    def remote_state_dict(self) -> dict[str, Any]:
        """Fetch the module's ``state_dict()``: parameters and buffers by name, on the CPU.

        It can be loaded into a module of the same class anywhere. Nothing keeps others from training the
        module meanwhile.

        Thread: any.   Progress: waits for remote progress.   Copies: one, by the network.
        """
        return full_state_dict(self)

    def load_remote_state_dict(self, state_dict: StateDict, strict: bool = True) -> LoadedKeys:
        """Copy a state dict into the module's parameters and buffers, which stay the same objects.

        Args:
            state_dict: From :meth:`remote_state_dict`, or from ``state_dict()`` of such a module anywhere.
            strict: Refuse a state dict with keys too few or too many.

        Returns:
            The keys that were missing and those that nothing here wants.

        Raises:
            RuntimeError: It does not fit; all that differs is listed, and nothing was changed.

        Thread: any.   Progress: waits for remote progress.   Copies: one, by the network.
        """
        return load_full_state_dict(self, state_dict, strict)

    def get_module_rref(self) -> RRef[nn.Module]:
        """Return the RRef to the module.

        Thread: any.   Progress: never blocks.
        """
        return self.module_rref

    def train(self: _Self, mode: bool = True) -> _Self:
        """Set the module's mode at its owner, for all who hold a handle; ``eval()`` is ``train(False)``.

        ``training`` of this handle is what was last set through it.

        Thread: any.   Progress: waits for remote progress.
        """
        rpc_sync(self.module_rref.owner(), _set_training, args=(self.module_rref, mode))
        self.training = mode
        return self

    def __repr__(self) -> str:
        return f"RemoteModule(on={self.on!r}, device={self.device!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        raise RRefError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC, "
            f"this one is a handle to a module on {self.on!r}",
            "save the module's remote_state_dict(), or full_state_dict(model) of a model with such modules",
        )

    def __reduce_for_rpc__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.device, self.module_rref)


def _rebuild(cls: type[RemoteModule], device: str, module_rref: RRef[nn.Module]) -> RemoteModule:
    """Make a handle from what travels; the other end of ``RemoteModule.__reduce__``."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module._attach(module_rref.owner(), device, module_rref)
    return module


def _check_constructor_arguments(module_cls: object, args: object, kwargs: object) -> None:
    if not callable(module_cls):
        raise TypeError(f"module_cls must be a subclass of nn.Module or a function, not {module_cls!r}")
    if isinstance(module_cls, type) and not issubclass(module_cls, nn.Module):
        raise ValueError(_no_module(f"it returns an instance of {module_cls}"))
    if not (args is None or isinstance(args, (tuple, list))):
        raise TypeError(f"args must be a tuple or a list of arguments, not {type(args).__name__}")
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise TypeError(f"kwargs must be a dict of keyword arguments, not {type(kwargs).__name__}")


def _no_module(but: str) -> str:
    return f"Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, but {but}."


def _parse_remote_device(remote_device: object) -> tuple[WorkerInfo, str]:
    """Read a worker and a device out of any form that the constructor takes."""
    if isinstance(remote_device, (int, WorkerInfo)) and not isinstance(remote_device, bool):
        return get_worker_info(remote_device), "cpu"
    if not isinstance(remote_device, str):
        raise TypeError(f"remote_device must be a str like 'worker1/cpu', not {type(remote_device).__name__}")
    worker, slash, device = remote_device.partition("/")
    if not slash and _is_device(worker):
        return get_worker_info(), worker
    if not worker or (slash and not _is_device(device)):
        raise ValueError(
            f"could not parse remote_device {remote_device!r}\n"
            "hint: write '<worker name>/<device>' or 'rank:<rank>/<device>', for example 'worker1/cpu'"
        )
    return _find_worker(worker), device or "cpu"


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _find_worker(text: str) -> WorkerInfo:
    """Find a worker by ``rank:<rank>``, by name, or else by a bare rank."""
    prefix, colon, rank = text.rpartition(":")
    if colon and prefix == "rank" and rank.isdecimal():
        return get_worker_info(int(rank))
    try:
        return get_worker_info(text)
    except UnknownWorkerError:
        if text.isdecimal():
            return get_worker_info(int(text))
        raise


# --- methods of nn.Module that a handle refuses ---

_AT_OWNER = "Please run it at the owner instead: ``module_rref.rpc_sync().{name}(...)``."

_WHERE_MADE = "Please do it where the module is made instead, in ``module_cls``."

_NO_GRADIENTS = "Gradients live in autograd contexts, so there is nothing to clear."

_INSTEAD = {
    "parameters": "Please use ``remote_parameters`` instead.",
    "load_state_dict": (
        "Please use ``load_remote_state_dict`` instead, or ``load_full_state_dict`` for a whole model."
    ),
    "named_parameters": "Please use ``remote_parameters`` instead.",
    "zero_grad": _NO_GRADIENTS,
    "to": "Please name the device in ``remote_device`` instead.",
    "cpu": "Please name the device in ``remote_device`` instead.",
    "cuda": "Please name the device in ``remote_device`` instead.",
    "add_module": _WHERE_MADE,
    "register_module": _WHERE_MADE,
    "register_parameter": _WHERE_MADE,
    "register_buffer": _WHERE_MADE,
    "register_forward_hook": _WHERE_MADE,
    "register_forward_pre_hook": _WHERE_MADE,
    "register_backward_hook": _WHERE_MADE,
    "register_full_backward_hook": _WHERE_MADE,
    "register_full_backward_pre_hook": _WHERE_MADE,
    "compile": _WHERE_MADE,
    "share_memory": "Processes on other nodes share no memory; send the RemoteModule itself, it is a handle.",
}
"""What to do instead of a refused method, where running it at the owner is not the answer."""


def _refusal(name: str) -> Callable[..., NoReturn]:
    instead = _INSTEAD.get(name, _AT_OWNER.format(name=name))
    message = f"Method ``{name}`` not supported for RemoteModule. {instead}"

    def refuse(self: RemoteModule, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(message)

    refuse.__name__ = name
    refuse.__qualname__ = f"RemoteModule.{name}"
    refuse.__doc__ = message
    return refuse


def _refuse_the_rest() -> None:
    """Refuse every public method of this torch's ``nn.Module`` that ``RemoteModule`` does not keep."""
    kept = {"forward", "train", "eval", "state_dict"}  # the last is refused by RemotePart
    for name, _ in inspect.getmembers(nn.Module, inspect.isfunction):
        if not name.startswith("_") and name not in kept:
            setattr(RemoteModule, name, _refusal(name))


_refuse_the_rest()


# --- at the owner ---


def _create_module(
    module_cls: Callable[..., nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> nn.Module:
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(_no_module(f"it returns an instance of {type(module)}"))
    return module.to(device)


def _run_forward(
    module_rref: RRef[nn.Module], device: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    module = module_rref.local_value()
    if torch.device(device).type == "cpu":
        return module(*args, **kwargs)
    result = module(*moved(args, device), **moved(kwargs, device))
    return moved(result, "cpu")  # with device maps, the result will stay where it is


def _parameter_rrefs(module_rref: RRef[nn.Module], recurse: bool) -> list[RRef[nn.Parameter]]:
    return [RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def _set_training(module_rref: RRef[nn.Module], mode: bool) -> None:
    module_rref.local_value().train(mode)
