"""Modules under torch's names whose contents are mpirpc's.

`install` must be called before any module of the suite is imported. Reads and writes go through to mpirpc, so
that a test which replaces a function there replaces it for all.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

TARGETS: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.rpc": ("mpirpc",),
    "torch.distributed.rpc.api": ("mpirpc.api", "mpirpc"),
    "torch.distributed.rpc.internal": ("mpirpc.api", "mpirpc"),
    "torch.distributed.rpc.constants": ("mpirpc",),
    "torch.distributed.rpc.functions": ("mpirpc.functions",),
    "torch.distributed.rpc.options": ("mpirpc.options", "mpirpc"),
    "torch.distributed.rpc.backend_registry": ("mpirpc.backend_registry",),
    "torch.distributed.rpc._testing": (),
    "torch.distributed.autograd": ("mpirpc.autograd",),
    "torch.distributed.optim": ("mpirpc.optim", "torch.distributed.optim"),
    "torch.distributed.nn": ("mpirpc.nn", "torch.distributed.nn"),
    "torch.distributed.nn.api.remote_module": ("mpirpc.nn",),
}
"""torch's module -> where its names are looked up, in this order."""

UNDER_TEST = ("DistributedOptimizer", "RemoteModule")
"""Never torch's own."""


class _MissingName(type):
    """Class of what stands for a private name that nobody provides: raises when used."""

    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(f"{cls.__name__} is not provided (wanted .{name})")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} is not provided")


class Facade(types.ModuleType):
    """A module under a torch name whose attributes live in other modules.

    Reads try ``extras``, then each target; writes and deletes go to the first of these that has the name.
    While ``importing`` is set, a missing name becomes a class that raises when used: one absent private
    helper must not keep a whole test file from loading. Each such name is added to ``missing``.
    """

    importing: ClassVar[bool] = True
    missing: ClassVar[set[str]] = set()

    extras: dict[str, Any]

    def __init__(self, name: str, targets: list[types.ModuleType]) -> None:
        super().__init__(name)
        self.__dict__.update(_targets=targets, extras={}, _deleted=set())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self._deleted:
            raise AttributeError(name)
        if name in self.extras:
            return self.extras[name]
        owner = self._owner(name)
        if owner is not None:
            return getattr(owner, name)
        full = f"{self.__name__}.{name}"
        if Facade.importing:
            Facade.missing.add(full)
            return _MissingName(full, (), {})
        raise AttributeError(f"{full} is not provided")

    def _owner(self, name: str) -> types.ModuleType | None:
        for target in self._targets:
            from_torch = target.__name__.startswith("torch.")
            if hasattr(target, name) and not (from_torch and name in UNDER_TEST):
                return target  # type: ignore[no-any-return]
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        self._deleted.discard(name)
        if name.startswith("__"):
            super().__setattr__(name, value)
        elif name in self.extras or not self._targets:
            self.extras[name] = value
        else:
            setattr(self._owner(name) or self._targets[0], name, value)

    def __delattr__(self, name: str) -> None:
        owner = self._owner(name)
        self._deleted.add(name)  # mock.patch asks hasattr() next, then sets it again
        if name in self.extras:
            del self.extras[name]
        elif owner is not None:
            delattr(owner, name)


def make() -> dict[str, Facade]:
    """Make all facades, each an attribute of its parent; torch's own modules are untouched."""
    for name in TARGETS:
        importlib.import_module(name)  # now: later the name means the facade
    facades = {
        name: Facade(name, [importlib.import_module(target) for target in targets])
        for name, targets in TARGETS.items()
    }
    for name, facade in facades.items():
        facade.extras["is_available"] = lambda: True
        parent, _, leaf = name.rpartition(".")
        if parent in facades:
            facades[parent].extras[leaf] = facade
    return facades


def install(facades: Mapping[str, Facade]) -> None:
    """Put the facades in the place of torch's modules."""
    for name, facade in facades.items():
        sys.modules[name] = facade
        parent, _, leaf = name.rpartition(".")
        if parent == "torch.distributed":
            setattr(sys.modules[parent], leaf, facade)
