"""Every setting of mpirpc: meaning, unit, default, environment variable.

Rules for this file: variables that set something are read here and nowhere else (``_core/launcher.py``
reads those by which launchers tell who they are). A value given in code wins over the environment, which
wins over the default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpirpc.errors import ConfigurationError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPIRpcBackendOptions", "RpcBackendOptions"]

DEFAULT_RPC_TIMEOUT = 60.0
DEFAULT_INIT_METHOD = "mpi://"

DeviceLike = torch.device | str | int


class RpcBackendOptions:
    """What every transport knows: how long a call may take, and how workers find each other.

    Attributes:
        rpc_timeout: Default limit of one call in seconds; 0 means no limit.
        init_method: How workers meet. Always the MPI communicator here; kept for programs that pass it.
    """

    def __init__(
        self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT, init_method: str = DEFAULT_INIT_METHOD
    ) -> None:
        if not isinstance(rpc_timeout, (int, float)) or isinstance(rpc_timeout, bool) or not rpc_timeout >= 0:
            raise ConfigurationError(
                f"rpc_timeout={rpc_timeout!r} is not a time limit",
                "give seconds, 0 for no limit",
            )
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class MPIRpcBackendOptions(RpcBackendOptions):
    """Settings of the MPI transport.

    Args:
        num_worker_threads: How many calls may run at one time on this worker (MPIRPC_NUM_WORKER_THREADS). A
            call that waits for another call does not count, and goes on at once when that is over, beside the
            one that has taken its place.
        rpc_timeout: Default limit of one call in seconds; 0 means no limit (MPIRPC_RPC_TIMEOUT).
        init_method: Accepted for programs that pass it; workers always meet by the communicator.
        device_maps: For each callee's name, which CUDA device of ours maps to which of theirs.
        devices: CUDA devices that this worker uses.
        comm: The mpi4py communicator whose ranks form the group; default ``MPI.COMM_WORLD``. It is
            duplicated.
        eager_limit: Tensors up to this many bytes travel inside the first MPI message (MPIRPC_EAGER_LIMIT).
        chunk_nbytes: Larger tensors are cut into MPI messages of at most this size; MPI libraries before
            MPI-4 refuse more than 2**31 - 1 (MPIRPC_CHUNK_NBYTES).
        max_unfinished_nbytes: How many bytes per callee may be on their way, or in calls of ``rpc_async`` and
            ``remote`` without an answer, before a caller has to wait (MPIRPC_MAX_UNFINISHED_NBYTES). A
            function that runs as a call waits only for bytes on their way.
        spin_time: How long, in seconds, a waiting thread looks at the network without sleeping
            (MPIRPC_SPIN_TIME).
        idle_sleep: Longest sleep, in seconds, between two looks of an idle worker whose group is on several
            hosts (MPIRPC_IDLE_SLEEP). On one host messages wake it.
        reducers: How objects of a type (exactly this one) are taken apart in calls: a function that is given
            the object and returns ``(callable, args)``, as ``__reduce__`` does.

    Raises:
        ConfigurationError: A value is out of range; the message says the right form.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int | None = None,
        rpc_timeout: float | None = None,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Sequence[DeviceLike] | None = None,
        comm: MPI.Comm | None = None,
        eager_limit: int | None = None,
        chunk_nbytes: int | None = None,
        max_unfinished_nbytes: int | None = None,
        spin_time: float | None = None,
        idle_sleep: float | None = None,
        reducers: Mapping[type, Callable[[Any], tuple[Any, ...]]] | None = None,
    ) -> None:
        super().__init__(_real("rpc_timeout", rpc_timeout, DEFAULT_RPC_TIMEOUT, low=0), init_method)
        self.num_worker_threads = _whole("num_worker_threads", num_worker_threads, 16, low=1)
        self.eager_limit = _whole("eager_limit", eager_limit, 32 * 1024, low=0)
        self.chunk_nbytes = _whole("chunk_nbytes", chunk_nbytes, 1 << 30, low=1, high=2**31 - 1)
        self.max_unfinished_nbytes = _whole("max_unfinished_nbytes", max_unfinished_nbytes, 64 << 20, low=1)
        self.spin_time = _real("spin_time", spin_time, 2e-3, low=0)
        self.idle_sleep = _real("idle_sleep", idle_sleep, 2e-3, low=1e-5)
        self.comm = comm
        self.reducers = _reducers(reducers or {})
        self.devices = [_device(device) for device in devices or ()]
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Add to the map from this worker's devices to those of the worker named ``to``.

        Raises:
            ConfigurationError: Two devices here would map to one there, or a device here to two there.
        """
        mine = dict(self.device_maps.get(to, {}))
        for here, there in device_map.items():
            source, target = _device(here), _device(there)
            if mine.get(source, target) != target:
                raise ConfigurationError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target}, "
                    f"it is mapped to {mine[source]} already"
                )
            mine[source] = target
        if len(set(mine.values())) < len(mine):
            raise ConfigurationError(f"`set_device_map` only supports 1-to-1 mapping, got {mine} for {to!r}")
        self.device_maps[to] = mine

    def set_devices(self, devices: Sequence[DeviceLike]) -> None:
        """Name the CUDA devices that this worker uses."""
        self.devices = [_device(device) for device in devices]

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "comm"}
        return f"MPIRpcBackendOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


PICKLED_BY_ITSELF = frozenset(
    [bool, bytearray, bytes, complex, dict, float, frozenset, int, list, set, str, tuple, type, type(None)]
)
"""Types for which pickle has a way of its own, before it looks for others."""


def _reducers(given: Mapping[type, Any]) -> dict[type, Callable[[Any], tuple[Any, ...]]]:
    for kind, reducer in given.items():
        if kind in PICKLED_BY_ITSELF:
            raise ConfigurationError(
                f"reducers={{{kind.__name__}: ...}} has no effect: pickle asks nobody how to write it",
                "give a reducer for a class of your own",
            )
        if not (isinstance(kind, type) and callable(reducer)):
            raise ConfigurationError(
                f"reducers={{{kind!r}: {reducer!r}}} is no function of a type",
                "write {Type: function}; the function gets the object and returns (callable, args)",
            )
    return dict(given)


def _device(given: DeviceLike) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(f"{given!r} is not a device", "write for example 'cuda:0'") from error


def _whole(name: str, given: int | None, default: int, low: int, high: int | None = None) -> int:
    value = _from_environment(name, int) if given is None else given
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high and value > high):
        bound = f"from {low} to {high}" if high else f"of at least {low}"
        raise ConfigurationError(f"{name}={value!r} is not a whole number {bound}")
    return value


def _real(name: str, given: float | None, default: float, low: float) -> float:
    value = _from_environment(name, float) if given is None else given
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= low:
        raise ConfigurationError(f"{name}={value!r} is not a number of seconds of at least {low}")
    return float(value)


def _from_environment(name: str, kind: type[Any]) -> Any:
    variable = f"MPIRPC_{name.upper()}"
    text = os.environ.get(variable)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        form = "a whole number, as 65536" if kind is int else "a number of seconds, as 0.5"
        raise ConfigurationError(f"{variable}={text!r} is not a number", f"write {form}") from None
