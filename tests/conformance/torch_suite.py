"""The suite's test classes with fixtures for mpirpc mixed in; its globals, put back before each test."""

from __future__ import annotations

import concurrent.futures
import copy
import importlib
import sys
import threading
import types
import unittest
from collections.abc import Callable
from typing import Any

import torch

from tests.conformance.facades import Facade

SUITE = "torch.testing._internal.distributed"
FAULTY_GROUP = "FAULTY_AGENT_TESTS"
GROUPS = (
    "GENERIC_TESTS",
    "GENERIC_CUDA_TESTS",
    "TENSORPIPE_TESTS",
    "TENSORPIPE_CUDA_TESTS",
    FAULTY_GROUP,
)
"""Lists of classes in the suite's ``rpc_utils``."""

HOME = "rpc_conformance_suite"
"""Module in which the mixed classes live: some tests send ``self`` over RPC, so it must be importable."""

Fixture = Callable[[bool], type]
"""Makes the fixture class of a test class, ``fixture(faulty)``."""


class _NotCompilable:
    """Stands for a scripted function that ``torch.jit.script`` refused."""

    def __init__(self, function: types.FunctionType, error: str) -> None:
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = function.__module__
        self.error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} did not compile: {self.error}")


def _import_rpc_utils() -> types.ModuleType:
    """Import all of the suite; a function the TorchScript compiler refuses does not stop it."""
    real_script = torch.jit.script

    def script(obj: Any, optimize: Any = None, _frames_up: int = 0, **kwargs: Any) -> Any:
        try:
            return real_script(obj, optimize, _frames_up + 1, **kwargs)
        except Exception as error:
            if not isinstance(obj, types.FunctionType):
                raise
            return _NotCompilable(obj, str(error).strip().splitlines()[0])

    torch.jit.script = script  # type: ignore[assignment]
    try:
        return importlib.import_module(f"{SUITE}.rpc_utils")
    finally:
        torch.jit.script = real_script
        Facade.importing = False


def stub_expecttest() -> None:
    """``common_utils`` imports expecttest, which the RPC tests never use."""
    try:
        importlib.import_module("expecttest")
    except ImportError:
        module = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


class Suite:
    """Test classes by name.

    A class is made when first asked for: the faulty fixture registers a further backend, which some tests of
    the plain one do not expect.
    """

    def __init__(self, fixture: Fixture) -> None:
        stub_expecttest()
        self._fixture = fixture
        self._utils = _import_rpc_utils()
        self._bases: dict[str, type] = {}
        self._faulty: set[str] = set()
        for group in GROUPS:
            for cls in getattr(self._utils, group):
                self._bases[cls.__name__] = cls
                if group == FAULTY_GROUP:
                    self._faulty.add(cls.__name__)
        self._home = types.ModuleType(HOME)
        sys.modules[HOME] = self._home

    def __getitem__(self, name: str) -> Any:
        if not hasattr(self._home, name):
            setattr(self._home, name, self._mix(name, self._fixture(name in self._faulty)))
        return getattr(self._home, name)

    def _mix(self, name: str, fixture: type) -> type:
        return type(
            name, (self._bases[name], fixture, self._utils.MultiProcessTestCase), {"__module__": HOME}
        )

    def tests(self) -> list[str]:
        """Return every test as ``Class.test_method``."""
        plain = self._fixture(False)
        return [
            f"{name}.{method}"
            for name in self._bases
            for method in unittest.TestLoader().getTestCaseNames(self._mix(name, plain))
        ]


class StateKeeper:
    """Puts the suite's module globals and class attributes back before a test.

    The suite counts on one process per test: it sets futures, flags and counters in globals (and deletes a
    function) and never resets them.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Callable[[], Any]]] = []
        for name, module in list(sys.modules.items()):
            if name.startswith((f"{SUITE}.rpc", f"{SUITE}.nn", f"{SUITE}.ddp")):
                self._save_module(name, module)

    def _save_module(self, name: str, module: types.ModuleType) -> None:
        for attribute, value in list(vars(module).items()):
            self._save(module, attribute, value)
            if isinstance(value, type) and value.__module__ == name:
                for class_attribute, flag in list(vars(value).items()):
                    if flag is None or isinstance(flag, (bool, int)):
                        self._save(value, class_attribute, flag)

    def _save(self, owner: Any, attribute: str, value: Any) -> None:
        fresh = None if attribute.startswith("__") else _fresh(value)
        if fresh is not None:
            self._saved.append((owner, attribute, fresh))

    def restore(self) -> None:
        """Give every attribute the value that it had when this object was made."""
        for owner, attribute, fresh in self._saved:
            value = fresh()
            if vars(owner).get(attribute, NotImplemented) is not value:
                setattr(owner, attribute, value)


def _fresh(value: Any) -> Callable[[], Any] | None:
    """Return what makes the value that the attribute should start with; None if it need not be kept."""
    if value is None or isinstance(value, (bool, int, float, str, types.FunctionType)):
        return lambda: value
    if isinstance(value, (list, dict, set)):
        try:
            kept = copy.deepcopy(value)
        except Exception:
            return lambda: value
        return lambda: copy.deepcopy(kept)
    if isinstance(value, concurrent.futures.Future):
        return concurrent.futures.Future
    if isinstance(value, threading.Condition):
        return threading.Condition
    if type(value).__name__ in ("Tensor", "Parameter"):
        return lambda: _without_grad(value)
    return None


def _without_grad(tensor: Any) -> Any:
    tensor.grad = None
    return tensor
