"""Python object <-> payload + tensors + RRef forks.

Dense tensors and RRefs are lifted out of the pickle: the payload holds only their number, the message carries
them beside it (``Body.tensors``, ``Body.forks``). Scripted functions travel by name as others do, scripted
modules as ``torch.jit.save`` writes them. Everything else is pickled by the standard library, or by
``cloudpickle`` where that is installed and the standard library cannot (lambdas, closures).

Most calls are simple: a function known by name, with numbers, texts, tensors and RRefs as arguments. These
are *flat*: not pickled at all but written by ``marshal`` with the message, a tenth of the cost. A payload
that is flat begins with ``(``, a pickled one with ``0x80``.

Rules for this file: one pickler object per message, no state between messages, no lock held while user code
(``__reduce__``, ``__setstate__``) runs. What an RRef is comes from above: a :class:`RRefHook`.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mpirpc._core.messages import Body, Flat, ForkDescriptor, FunctionName, Payload
from mpirpc._core.tensor_layout import has_dtype
from mpirpc.errors import SerializationError
from mpirpc.functions import place_of_script

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

PROTOCOL = 5

_FLAT = ord("(")


@dataclass(frozen=True, slots=True)
class RRefHook:
    """How RRefs get into and out of messages.

    Attributes:
        rref_type: The class of RRef handles.
        fork: Makes a fork of a handle for the worker the message goes to.
        cancel: Takes a fork back: its message is never sent.
        reducers: The user's ways of taking objects of some types apart.
    """

    rref_type: type
    fork: Callable[[Any], ForkDescriptor]
    cancel: Callable[[ForkDescriptor], None]
    reducers: Mapping[type, Callable[[Any], tuple[Any, ...]]] = field(default_factory=dict)


Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Function, arguments, keyword arguments."""


def dumps_call(call: Call, hook: RRefHook | None = None) -> Body:
    """Prepare a call for another worker; see :func:`dumps`."""
    func, args, kwargs = call
    if not kwargs:
        try:
            name = _names.get(func) or _name_of(func)
        except TypeError:  # not hashable
            name = None
        if name is not None:
            if _SIMPLE.issuperset(map(type, args)):
                return Body(b"", [], [], (name, args, (), ()))
            body = _flatten(name, args, hook)
            if body is not None:
                return body
    return dumps(call, hook)


def dumps_result(result: object, hook: RRefHook | None = None) -> Body:
    """Prepare a result for another worker; see :func:`dumps`."""
    if type(result) in _SIMPLE:
        return Body(b"", [], [], (None, (result,), (), ()))
    return _flatten(None, (result,), hook) or dumps(result, hook)


def dumps(obj: object, hook: RRefHook | None = None) -> Body:
    """Pickle ``obj`` for another worker.

    Raises:
        SerializationError: Something in it cannot be pickled. Forks made on the way are cancelled.

    Thread: any; runs user code.   Copies: none of tensor data.
    """
    try:
        return _dump(_Pickler, obj, hook)
    except Exception as error:
        if cloudpickle is not None and isinstance(error, (pickle.PicklingError, AttributeError, TypeError)):
            return _dump_by_value(obj, hook, error)
        raise _cannot_pickle(obj, error) from error


# --- flat payloads ---

_SIMPLE = frozenset({int, float, complex, bool, type(None)})
_TEXTS = frozenset({str, bytes})
"""Types, exact, that marshal keeps as they are. Users' reducers are not for them."""

_LONGEST_TEXT = 1 << 16
"""Longer texts are pickled: what is flat stays small."""

_names: dict[Any, FunctionName] = {}
"""Functions that can be found by name, as it was found out; they live as long as their modules."""


class OnValue:
    """Stands where a call's function would: run a method of the RRef's value that is the first argument."""

    __slots__ = ("__qualname__", "method")

    def __init__(self, method: str) -> None:
        self.__qualname__ = self.method = method

    def __reduce__(self) -> tuple[Any, ...]:
        return OnValue, (self.method,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Only marks a call; never run."""
        raise SerializationError(f"method {self.method} of an RRef's value was called without its value")


def _name_of(func: Any) -> FunctionName | None:
    """Return where a function can be found by name: at the top of a module, or among torch's operators."""
    known = _names.get(func)
    if known is None:
        if type(func) is OnValue:
            return "", func.method
        module, name = _place_in_module(func)
        if name is None or getattr(sys.modules.get(module), name, None) is not func:
            return None
        known = _names[func] = (module, name)
    return known


def _place_in_module(func: Any) -> tuple[str, str | None]:
    """Return the module and the name that a function gives as its own."""
    if isinstance(func, torch.jit.ScriptFunction):
        return place_of_script(func)
    return getattr(func, "__module__", None) or "torch", getattr(func, "__name__", None)


def _find(name: FunctionName) -> Any:
    module, func = name
    if not module:
        return OnValue(func)
    try:
        return getattr(sys.modules[module], func)
    except KeyError:
        return getattr(importlib.import_module(module), func)


def _flatten(name: FunctionName | None, args: tuple[Any, ...], hook: RRefHook | None) -> Body | None:
    """Write a simple call, or a simple result (no name); None if it is not simple."""
    if hook is not None and hook.reducers and any(type(value) in hook.reducers for value in args):
        return None
    tensors: list[torch.Tensor] = []
    plain: list[Any] = []
    lifted: list[int] = []  # places of tensors
    rrefs: list[int] = []  # places of RRefs
    for place, value in enumerate(args):
        kind = type(value)
        if kind in _SIMPLE or (kind in _TEXTS and len(value) <= _LONGEST_TEXT):
            plain.append(value)
        elif kind is torch.Tensor and value.layout is torch.strided and _travels_raw(value):
            plain.append(_place_of(value, tensors))
            lifted.append(place)
        elif hook is not None and kind is hook.rref_type:
            plain.append(0)
            rrefs.append(place)
        else:
            return None
    for number, place in enumerate(rrefs):
        plain[place] = number
    body = Body(b"", tensors, [], (name, tuple(plain), tuple(lifted), tuple(rrefs)))
    # forks last: nothing can fail after them
    if rrefs and hook is not None:
        for place in rrefs:
            _fork_into(body, hook, args[place])
    return body


def _fork_into(body: Body, hook: RRefHook, rref: Any) -> None:
    """Put a fork of a handle into ``body``; if it is refused, take back those made before."""
    try:
        body.forks.append(hook.fork(rref))
    except BaseException:
        for fork in body.forks:
            hook.cancel(fork)
        raise


def _place_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    """Return the place of a tensor in the message, adding it if it is not there yet."""
    for place, other in enumerate(tensors):
        if other is tensor:
            return place
    tensors.append(tensor)
    return len(tensors) - 1


def load_flat(flat: Flat, tensors: Sequence[torch.Tensor] = (), rrefs: Sequence[Any] = ()) -> Any:
    """Rebuild something flat; see :func:`loads`."""
    try:
        name, values, lifted, forked = flat
        if lifted or forked:
            plain = list(values)
            for place in lifted:
                plain[place] = tensors[plain[place]]
            for place in forked:
                plain[place] = rrefs[plain[place]]
            values = tuple(plain)
        return values[0] if name is None else (_find(name), values, {})
    except Exception as error:
        raise _cannot_rebuild(error) from error


# --- pickled payloads ---


def _dump_by_value(obj: object, hook: RRefHook | None, first: Exception) -> Body:
    """Try again with cloudpickle; report the first error if that fails too."""
    try:
        return _dump(_CloudPickler, obj, hook)
    except Exception:
        raise _cannot_pickle(obj, first) from first


def _dump(kind: type[Any], obj: object, hook: RRefHook | None) -> Body:
    buffer = io.BytesIO()
    pickler = kind(buffer, hook)
    try:
        pickler.dump(obj)
    except BaseException:
        if hook is not None:
            for fork in pickler.body.forks:
                hook.cancel(fork)
        raise
    body: Body = pickler.body
    body.payload = buffer.getvalue()
    return body


def _cannot_pickle(obj: object, error: Exception) -> SerializationError:
    hint = ""
    if (cloudpickle is None and "local object" in str(error)) or "lambda" in str(error):
        hint = "functions travel by name: move it to module level, or install cloudpickle on every worker"
    return SerializationError(f"cannot send {_short(obj)}: {type(error).__name__}: {error}", hint)


def _short(obj: object) -> str:
    try:
        text = repr(obj)
    except Exception:
        text = f"an object of type {type(obj).__name__}"
    return text if len(text) <= 200 else text[:197] + "..."


def loads(body: Body, tensors: Sequence[torch.Tensor], rrefs: Sequence[Any] = ()) -> Any:
    """Rebuild what :func:`dumps`, :func:`dumps_call` or :func:`dumps_result` made.

    Args:
        body: As it arrived.
        tensors: To stand in place of ``body.tensors``.
        rrefs: One handle for each of ``body.forks``.

    Raises:
        SerializationError: Something cannot be rebuilt here; the cause says what.

    Thread: any; runs user code.
    """
    if body.flat is not None:
        return load_flat(body.flat, tensors, rrefs)
    payload = body.payload
    try:
        if payload[0] == _FLAT:
            return load_flat(marshal.loads(payload), tensors, rrefs)
        return _Unpickler(payload, tensors, rrefs).load()
    except SerializationError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        raise _cannot_rebuild(error) from error


def _cannot_rebuild(error: BaseException) -> SerializationError:
    return SerializationError(
        f"cannot rebuild what arrived: {type(error).__name__}: {error}",
        "the RPC pickler does not serialize code: the same code must be importable on every worker",
    )


def _tensor(index: int) -> torch.Tensor:
    """Stand in a payload for tensor number ``index``; only :class:`_Unpickler` knows the tensors."""
    raise SerializationError(f"tensor {index} of a message was unpickled outside of its message")


def _rref(index: int) -> object:
    """Stand in a payload for fork number ``index``."""
    raise SerializationError(f"rref {index} of a message was unpickled outside of its message")


_QUANTIZED = frozenset([torch.qint8, torch.quint8, torch.qint32])
"""Dtypes of tensors that can be told by their integers."""


def _travels_raw(tensor: torch.Tensor) -> bool:
    """Say whether the tensor can travel as plain bytes; others go through torch's own pickling."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and has_dtype(tensor.dtype)
        and (tensor.layout is torch.strided or tensor.layout is torch.sparse_coo)
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor.is_nested
    )


def _reduce(body: Body, hook: RRefHook | None, obj: Any) -> Any:
    """Lift a tensor or an RRef out of the pickle into ``body``; NotImplemented for anything else."""
    kind = type(obj)
    if hook is not None and kind in hook.reducers:
        return hook.reducers[kind](obj)
    if kind is torch.Tensor:
        if _travels_raw(obj):
            body.tensors.append(obj)
            return _tensor, (len(body.tensors) - 1,)
        if obj.dtype in _QUANTIZED:
            return _reduce_quantized(obj)
    elif hook is not None and kind is hook.rref_type:
        body.forks.append(hook.fork(obj))
        return _rref, (len(body.forks) - 1,)
    elif isinstance(obj, torch._C.Future):
        raise pickle.PicklingError("Can not pickle torch.futures.Future")
    elif isinstance(obj, torch.jit.ScriptModule):
        return _load_script_module, (_save_script_module(obj),)
    elif isinstance(obj, torch.jit.ScriptFunction) and (name := _name_of(obj)) is not None:
        return _find, (name,)
    elif hasattr(kind, "__reduce_for_rpc__"):  # instead of __reduce__, where things travel in calls only
        return obj.__reduce_for_rpc__()
    return NotImplemented


def _reduce_quantized(tensor: torch.Tensor) -> Any:
    """Take a quantized tensor apart: the integers, and what they mean. NotImplemented for rare schemes."""
    if tensor.qscheme() is torch.per_tensor_affine:
        numbers = tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()
        return torch._make_per_tensor_quantized_tensor, numbers
    if tensor.qscheme() is torch.per_channel_affine:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        axis = tensor.q_per_channel_axis()
        return torch._make_per_channel_quantized_tensor, (tensor.int_repr(), scales, zeros, axis)
    return NotImplemented


def _save_script_module(module: torch.jit.ScriptModule) -> bytes:
    """Write a scripted module with its code and tensors.   Copies: its tensors."""
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    return buffer.getvalue()


def _load_script_module(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, hook: RRefHook | None) -> None:
        super().__init__(file, PROTOCOL)
        self.body = Body()
        self._hook = hook

    def reducer_override(self, obj: Any) -> Any:
        return _reduce(self.body, self._hook, obj)


if cloudpickle is not None:

    class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: io.BytesIO, hook: RRefHook | None) -> None:
            super().__init__(file, PROTOCOL)
            self.body = Body()
            self._hook = hook

        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduce(self.body, self._hook, obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, payload: Payload, tensors: Sequence[torch.Tensor], rrefs: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(payload))
        self._lifted = {"_tensor": tensors.__getitem__, "_rref": rrefs.__getitem__}

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in self._lifted:
            return self._lifted[name]
        return super().find_class(module, name)
