"""Set up every test run, with and without ranks.

Without mpirun this file only says which launcher the MPI suites will use. Under mpirun, where pytest-mpi's
``--with-mpi`` is required, it puts in the plugin that keeps the ranks in step, and gives each rank a
temporary root of its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version

import hypothesis
import pytest

from tests._ranks.launch import mpirun_version

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
"""A rank started by mpirun or srun has at least one of these variables."""

MPI_FOLDERS = ("tests/mpi/", "tests/parity/")
"""Where every test needs ranks, and the mark that says so."""


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Add the in-step plugin; trylast, so that the terminal reporter is there."""
    # A shared machine is slow at times; and ranks must draw the same examples, so there they are not random.
    ranks = _with_mpi(config)
    hypothesis.settings.register_profile("here", deadline=None)
    hypothesis.settings.register_profile("ranks", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("ranks" if ranks else "here")
    if ranks:
        from tests._ranks.in_step import InStep

        _own_temporary_root(config)
        _drop_summary_of_pytest_mpi(config)
        _require_threads()
        config.pluginmanager.register(InStep(config), "in-step")
    elif any(name in os.environ for name in LAUNCHED):
        raise pytest.UsageError(
            "under mpirun pytest needs --with-mpi, else each rank runs everything by itself"
        )


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is being tested: launcher or MPI library, and the packages that matter."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("mpi4py", "torch", "numpy", "pytest-mpi"))
    first = _mpi_line() if _with_mpi(config) else f"MPI suites: started with {mpirun_version()}"
    return [first, f"packages: {packages}"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse what pytest-mpi lets pass: misspelt arguments of its mark, tests for ranks without it."""
    for item in items:
        marks = list(item.iter_markers(name="mpi"))
        unknown = {name for mark in marks for name in mark.kwargs if name != "min_size"}
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: the mark mpi takes min_size only, not {sorted(unknown)}")
        if not marks and item.nodeid.startswith(MPI_FOLDERS):
            raise pytest.UsageError(f"{item.nodeid}: tests here need @pytest.mark.mpi(min_size=...)")


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi"))


def _own_temporary_root(config: pytest.Config) -> None:
    """Give this rank a root for ``tmp_path`` that is removed when its pytest ends.

    pytest's own is one for all pytests of a user, each of which removes old folders at its end. Ranks end
    together: one finds that another has just removed a folder, and a warning ends it with status 1.
    """
    variable = "PYTEST_DEBUG_TEMPROOT"  # read when tmp_path is first used
    above = os.environ.get(variable)
    root = tempfile.mkdtemp(prefix="mpirpc-rank-", dir=above)
    os.environ[variable] = root

    def restore() -> None:
        shutil.rmtree(root, ignore_errors=True)
        if above is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = above

    config.add_cleanup(restore)


def _require_threads() -> None:
    """The plugin calls MPI on the main thread while the library's own threads do."""
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise pytest.UsageError("the MPI tests need MPI_THREAD_MULTIPLE, which this MPI did not grant")


def _mpi_line() -> str:
    from mpi4py import MPI

    levels = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]
    order = [MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE]
    vendor, numbers = MPI.get_vendor()  # not Get_library_version: Open MPI's ends in a NUL byte
    return (
        f"MPI: {vendor} {'.'.join(map(str, numbers))}, standard {'.'.join(map(str, MPI.Get_version()))}, "
        f"thread level {levels[order.index(MPI.Query_thread())]}, world size {MPI.COMM_WORLD.size}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _drop_summary_of_pytest_mpi(config: pytest.Config) -> None:
    """Our header has it already, and its closing summary holds a NUL byte under Open MPI."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False
