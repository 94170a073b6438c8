"""Every exception class of mpirpc: the type says whose fault it is and in which phase.

::

    RpcError (RuntimeError)                  base; RuntimeError because torch users catch that
    |-- NotInitializedError                  call before init_rpc or after shutdown
    |-- UnknownWorkerError (ValueError)      no worker has this name or rank
    |-- RpcTimeoutError (TimeoutError)       the deadline passed
    |-- RemoteError                          the callee raised and its exception cannot be rebuilt here
    |   `-- OptimizerError                   a distributed optimizer failed on some owners; all are named
    |-- WorkerLostError                      a peer is gone or the job is aborting
    |-- NotAFutureError (TypeError)          an async_execution function returned no future
    |-- SerializationError                   an argument or result cannot be pickled or unpickled
    |-- RRefError                            value asked from a non-owner, value deleted, failed creation
    |-- AutogradError                        unknown context, bad root, a failed backward pass
    |-- ProtocolError
    |   |-- LocalProtocolError               we (or the caller) broke the protocol
    |   `-- RemoteProtocolError              the peer did: versions differ, or a bug there
    |-- TransportError                       MPI said no
    |-- ConfigurationError (ValueError)      an option or environment variable is wrong
    `-- InternalError                        a bug in mpirpc

    RemoteTraceback (Exception)              never raised: the ``__cause__`` of an exception that came from a
    callee

Rules for this file: exceptions carry fields, build their sentence once, and survive pickling. First line:
    what
happened. Second line, where one helps: ``hint:`` and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "AutogradError",
    "ConfigurationError",
    "InternalError",
    "LocalProtocolError",
    "NotAFutureError",
    "NotInitializedError",
    "OptimizerError",
    "ProtocolError",
    "RRefError",
    "RemoteError",
    "RemoteProtocolError",
    "RemoteTraceback",
    "RpcError",
    "RpcTimeoutError",
    "SerializationError",
    "TransportError",
    "UnknownWorkerError",
    "WorkerLostError",
]


class RpcError(RuntimeError):
    """Base of every error that mpirpc raises by itself.

    Args:
        message: What happened: lower case, no full stop, values in it.
        hint: The next step for the reader; becomes the second line.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class NotInitializedError(RpcError):
    """A call before ``init_rpc`` or after ``shutdown``. Call ``init_rpc`` first."""


class UnknownWorkerError(RpcError, ValueError):
    """No worker of the group has this name or rank. The message lists those there are."""


class RpcTimeoutError(RpcError, TimeoutError):
    """No response came before the deadline. The call may still run at the callee.

    Attributes:
        worker: ``'name' (rank r)`` of the callee.
        timeout: The limit in seconds.
    """

    def __init__(self, message: str, hint: str = "", worker: str = "", timeout: float = 0.0) -> None:
        super().__init__(message, hint)
        self.worker = worker
        self.timeout = timeout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.worker, self.timeout)


class RemoteError(RpcError):
    """The callee's function raised an exception that cannot be rebuilt at the caller.

    Attributes:
        type_name: Qualified name of the exception's class at the callee.
        worker: ``'name' (rank r)`` of the callee.
    """

    def __init__(self, message: str, hint: str = "", type_name: str = "", worker: str = "") -> None:
        super().__init__(message, hint)
        self.type_name = type_name
        self.worker = worker

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.type_name, self.worker)


class OptimizerError(RemoteError):
    """Something that a distributed optimizer did on all owners of its parameters failed on some of them.

    It was tried on all owners, and the message has a line for each that failed.

    Attributes:
        failures: ``'name' (rank r)`` of each owner that failed, and what it raised there.
    """

    def __init__(
        self, message: str, hint: str = "", failures: Sequence[tuple[str, BaseException]] = ()
    ) -> None:
        self.failures = tuple(failures)
        type_name = type(self.failures[0][1]).__qualname__ if self.failures else ""
        super().__init__(message, hint, type_name, ", ".join(worker for worker, _ in self.failures))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.failures)


class RemoteTraceback(Exception):
    """Carries the traceback text of a callee as the ``__cause__`` of the exception raised at the caller."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class WorkerLostError(RpcError):
    """A peer is gone, or this worker is being stopped while calls are pending."""


class NotAFutureError(RpcError, TypeError):
    """A function marked by ``async_execution`` returned something that is not a ``torch.futures.Future``."""


class SerializationError(RpcError):
    """An argument or a result cannot be pickled or unpickled; the message names the object."""


class RRefError(RpcError):
    """An RRef was used where it cannot be: on a non-owner, after deletion, or outside a call."""


class AutogradError(RpcError):
    """Distributed autograd was misused, or a backward pass failed on some worker."""


class ProtocolError(RpcError):
    """A message or a call came that has no place in the state it met."""


class LocalProtocolError(ProtocolError):
    """This worker (or its caller) broke the protocol."""


class RemoteProtocolError(ProtocolError):
    """A peer sent what cannot be: another version of mpirpc, damaged bytes, or a bug there."""


class TransportError(RpcError):
    """MPI refused an operation; the MPI error class and text are in the message."""


class ConfigurationError(RpcError, ValueError):
    """An option or environment variable is wrong; the message says the right form."""


class InternalError(RpcError):
    """A bug in mpirpc. Please report it with the output of ``python -m mpirpc doctor``."""
