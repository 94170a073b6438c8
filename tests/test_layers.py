"""The shape of the package: imports point down, files stay small, machinery keeps to its place.

The table below is the one that the design pages speak of. A file may import from lower rows only: not from
higher ones, not from its own. A new file needs a place in it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests._ranks.launch import ROOT

PACKAGE = ROOT / "mpirpc"
LAYERS = [
    ["errors"],
    [
        "options",
        "functions",
        "_core/messages",
        "_core/timing",
        "_core/devices",
        "_core/host_memory",
        "_core/transport",
        "_core/current",
        "_core/interrupts",
        "_core/launcher",
        "_core/rank_launcher",
    ],
    ["_core/parameter_locks", "_core/autograd_checks", "_core/doorbell", "_core/waiter"],
    [
        "_core/autograd_hooks",
        "_core/tensor_layout",
        "_core/sparse_layout",
        "_core/rref_protocol",
        "_core/rest_protocol",
        "_core/autograd_protocol",
        "_core/profiling",
    ],
    ["_core/short_messages"],
    [
        "_core/profiler_hooks",
        "_core/mpi_faults",
        "_core/mpi_group",
        "_core/posted_heads",
        "_core/wire",
        "_core/pickling",
        "_core/autograd_context",
        "_core/autograd_graph",
    ],
    [
        "_core/job",
        "_core/autograd_gradients",
        "_core/transport_loopback",
        "_core/progress",
        "_core/error_transfer",
    ],
    ["_core/flow", "_core/executor", "_core/autograd_pass", "_core/transport_mpi"],
    ["_core/agent", "_core/autograd_engine"],
    ["_core/rref_store", "_core/future", "_core/survivors"],
    ["_core/contents"],
    ["_core/call", "_core/serve"],
    ["rref", "_core/gathering"],
    ["_core/runtime"],
    ["backend_registry", "autograd"],
    ["api", "profiler", "testing"],
    ["moving"],
    ["local_optimizer", "split_model"],
    ["param_groups", "nn"],
    ["optim", "launch", "pytest_plugin"],
    ["__init__"],
    ["cli/terminal"],
    ["dropin", "cli/doctor_checks"],
    ["cli/run", "cli/doctor_facts"],
    ["cli/demo", "cli/bench_work", "cli/bench_rows", "cli/bench_torch_peer"],
    ["cli/doctor", "cli/bench_peers", "cli/bench_mpi_peer", "cli/bench_plot"],
    ["cli/bench_run", "cli/bench_report"],
    ["cli/bench"],
    ["__main__"],
]
"""From the bottom to the top; names are files of ``mpirpc/`` without ``.py``."""

LAYER = {name: number for number, row in enumerate(LAYERS) for name in row}
DOCSTRING_ONLY = ["_core/__init__", "cli/__init__"]

MPI4PY_ALLOWED = [
    "_core/transport_mpi",
    "_core/mpi_faults",
    "_core/mpi_group",
    "_core/posted_heads",
    "_core/job",
    "cli/bench_mpi_peer",
    "cli/doctor_facts",
]
MPI4PY_FOR_TYPES = ["options"]
"""May import mpi4py under ``if TYPE_CHECKING:`` only."""

RPC_OF_TORCH_ALLOWED = ["cli/bench_torch_peer"]
"""The benchmark's other side."""

TORCH_RPC_ALLOWED = ["cli/bench_torch_peer"]
"""It is what bench compares with: a program of its own, started by its path, that no other file imports."""

PUBLIC_API_ONLY = ("optim", "param_groups", "nn", "split_model", "moving", "cli/", "__main__")
"""Written as outsiders would write them: when one needs a private name, the API lacks something."""

MAX_LINES = 500


class Import(NamedTuple):
    """One imported module, absolute name, and where."""

    name: str
    line: int
    in_function: bool
    for_types: bool


def files() -> dict[str, Path]:
    """Every Python file of the package by its name in the table."""
    return {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


def imports_of(path: Path) -> list[Import]:
    """Every import in a file, wherever it stands."""
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), False, False))


def _walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, in_function, for_types)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in line {node.lineno}"
        for alias in node.names:
            yield Import(f"{node.module}.{alias.name}", node.lineno, in_function, for_types)
    in_function = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, in_function, for_types or child in guarded)


def own_file(name: str) -> str | None:
    """The table's name of the file that an import of ours loads; None for other packages."""
    parts = name.split(".")
    if parts[0] != "mpirpc":
        return None
    for end in range(len(parts), 1, -1):
        for candidate in ("/".join(parts[1:end]), "/".join([*parts[1:end], "__init__"])):
            if candidate in FILES:
                return candidate
    return "__init__"


FILES = files()


def test_every_file_has_a_place():
    assert sorted(set(FILES) - set(DOCSTRING_ONLY) - set(LAYER)) == []


def test_every_place_has_a_file():
    assert sorted(set(LAYER) - set(FILES)) == []


@pytest.mark.parametrize("name", sorted(set(FILES) & set(LAYER)))
def test_imports_point_down_and_stand_at_the_top(name):
    wrong = []
    for imported in imports_of(FILES[name]):
        target = own_file(imported.name)
        if target is None or target in DOCSTRING_ONLY:
            continue
        if imported.in_function:
            wrong.append(f"line {imported.line}: {target} is imported inside a function")
        if LAYER.get(target, len(LAYERS)) >= LAYER[name]:
            wrong.append(f"line {imported.line}: {target} does not lie below")
    assert wrong == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_mpi4py_stays_in_its_files(name):
    found = [imported for imported in imports_of(FILES[name]) if imported.name.split(".")[0] == "mpi4py"]
    if name in MPI4PY_FOR_TYPES:
        found = [imported for imported in found if not imported.for_types]
    assert name in MPI4PY_ALLOWED or found == []


@pytest.mark.parametrize("name", sorted(set(FILES) - set(RPC_OF_TORCH_ALLOWED)))
def test_nothing_uses_the_rpc_of_torch(name):
    forbidden = ("torch.distributed.rpc", "torch.distributed.autograd")
    found = [imported for imported in imports_of(FILES[name]) if imported.name.startswith(forbidden)]
    assert name in TORCH_RPC_ALLOWED or found == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_programs_of_their_own_are_imported_by_nothing(name):
    targets = {own_file(imported.name) for imported in imports_of(FILES[name])}
    assert targets.isdisjoint(TORCH_RPC_ALLOWED)


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.startswith(PUBLIC_API_ONLY)))
def test_upper_files_use_the_public_api_only(name):
    assert [found for found in imports_of(FILES[name]) if found.name.startswith("mpirpc._")] == []


@pytest.mark.parametrize("name", [name for name in DOCSTRING_ONLY if name in FILES])
def test_package_files_hold_a_docstring_only(name):
    assert len(ast.parse(FILES[name].read_text(encoding="utf-8")).body) == 1


def test_files_are_short_enough():
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for folder in ("mpirpc", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def public_modules() -> list[str]:
    """Modules without an underscore in their path, by import name."""
    names = ["mpirpc"]
    names += [
        "mpirpc." + name.replace("/", ".") for name in FILES if not any(p[0] == "_" for p in name.split("/"))
    ]
    return sorted(names)


@pytest.mark.parametrize("module_name", public_modules())
def test_every_public_name_is_documented(module_name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns while it imports some of its own modules
        module = importlib.import_module(module_name)
    assert module.__doc__
    missing = [name for name in getattr(module, "__all__", ()) if not _is_documented(getattr(module, name))]
    missing += [
        f"{name}.{member}"
        for name in getattr(module, "__all__", ())
        for member in _own_public_members(getattr(module, name))
    ]
    assert missing == []


def _is_documented(value: object) -> bool:
    describable = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    return not describable or bool(value.__doc__)


def _own_public_members(value: object) -> list[str]:
    """Undocumented public methods and properties that a class of ours defines itself."""
    if not inspect.isclass(value) or not value.__module__.startswith("mpirpc"):
        return []
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_")
        and (inspect.isroutine(member) or isinstance(member, property))
        and not inspect.getdoc(getattr(value, name))
    ]
