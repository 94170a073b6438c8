"""A distributed optimizer at one owner: a ``torch.optim`` optimizer over the parameters that live here.

For ``mpirpc.optim``, which makes one at each owner and calls its methods by RPC; programs have no use for it.

Words: a *group* is a parameter group, numbered as the user gave them; an owner has a *part* of a group, or
none. A parameter's *position* is its place among all that the user gave, group after group. Positions are all
that goes between caller and owner to say which parameter is meant.

Rules for this file: public API, and the locks that it shares with the hooks of leaves. ``torch.optim`` does
the arithmetic; gradients and ``.grad`` change only as the methods say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from mpirpc._core.parameter_locks import PARAMETER_LOCKS
from mpirpc.autograd import get_gradients
from mpirpc.errors import AutogradError
from mpirpc.moving import moved
from mpirpc.rref import RRef

__all__ = ["GroupPart", "LocalOptimizer", "Made", "Saved", "call_local_optimizer", "new_local_optimizer"]

Options = dict[str, Any]
"""A parameter group without its parameters: learning rate and the like."""


# --- what travels ---


@dataclass(frozen=True, slots=True)
class GroupPart:
    """The caller tells an owner which of its parameters are in a group.

    Attributes:
        group: Number of the group.
        params: Position and RRef of each parameter.
        options: As the user gave them for the group.
    """

    group: int
    params: tuple[tuple[int, RRef[Any]], ...]
    options: Options


@dataclass(frozen=True, slots=True)
class Made:
    """An owner tells the caller what it has made.

    Attributes:
        optimizer: The local optimizer.
        shapes: Shape of each parameter by its position. Of several RRefs to one parameter only the first has
            an entry.
        options: All options of each group, by its number.
        defaults: The options that a group has if it names none.
    """

    optimizer: RRef[LocalOptimizer]
    shapes: dict[int, tuple[int, ...]]
    options: dict[int, Options]
    defaults: Options


@dataclass(frozen=True, slots=True)
class Saved:
    """The whole of a local optimizer, from owner to caller or back.

    Attributes:
        state: State of each parameter that has one, by its position; tensors are on the CPU.
        options: Options of each group, by its number.
    """

    state: dict[int, Any]
    options: dict[int, Options]


# --- the local optimizer ---


class LocalOptimizer:
    """The ``torch.optim`` optimizer of one owner, over its part of the parameters.

    Args:
        optimizer_class: What to make.
        parts: This owner's parts of the groups.
        grouped: The class gets a list of groups; else the parameters of the only part, as a plain list.
        args: Further arguments of ``optimizer_class``.
        kwargs: Its keyword arguments.

    Attributes:
        optimizer: Changed under the locks of its parameters.

    Thread: any, all methods.
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        parts: Sequence[GroupPart],
        grouped: bool,
        args: tuple[Any, ...],
        kwargs: Options,
    ) -> None:
        # Parameter -> position, in the order in which optimizer numbers them. Grows under the locks.
        self._positions: dict[Tensor, int] = {}
        # Group -> its place in optimizer.param_groups. Grows under the locks.
        self._places: dict[int, int] = {}
        groups = [self._take(part) for part in parts]
        self.optimizer: Any = optimizer_class(groups if grouped else groups[0]["params"], *args, **kwargs)
        self._locks = PARAMETER_LOCKS.of(self._positions)

    def _take(self, part: GroupPart) -> dict[str, Any]:
        """Note a part and return the group that ``torch.optim`` takes: a parameter named twice once."""
        params: dict[Tensor, int] = {}
        for position, rref in part.params:
            param = rref.local_value()
            if not isinstance(param, Tensor):
                raise TypeError(f"parameter {position} is no tensor but a {type(param).__name__}")
            params.setdefault(param, position)
        self._places[part.group] = len(self._places)
        self._positions = {**self._positions, **params}
        return {**part.options, "params": list(params)}

    def made(self, optimizer: RRef[LocalOptimizer]) -> Made:
        """Describe this optimizer to the caller that made it."""
        shapes = {position: tuple(param.shape) for param, position in self._positions.items()}
        return Made(optimizer, shapes, self._options(), moved(self.optimizer.defaults, "cpu"))

    def add_group(self, part: GroupPart) -> Made:
        """Take in one more group; the answer tells of this group only."""
        with self._exclusive():
            before = dict(self._positions)
            try:
                self.optimizer.add_param_group(self._take(part))
            except BaseException:
                self._positions = before
                del self._places[part.group]
                raise
            self._locks = PARAMETER_LOCKS.of(self._positions)
            new = {param: position for param, position in self._positions.items() if param not in before}
            shapes = {position: tuple(param.shape) for param, position in new.items()}
            return Made(RRef(self), shapes, {part.group: self._options()[part.group]}, {})

    def step(self, changes: Mapping[int, Options], context_id: int) -> None:
        """Step from the context's gradients, while no other optimizer steps any of the same parameters.

        Args:
            changes: Options that the caller has changed, by group.
            context_id: Whose gradients to take. ``.grad`` of the parameters is afterwards as before.
        """
        with self._exclusive(), _lent_gradients(list(self._positions), _gradients_here(context_id)):
            self._set_options(changes)
            self.optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear ``.grad`` of the parameters; contexts keep theirs."""
        with self._exclusive():
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def gradient_norms(self, context_id: int, norm_type: float) -> tuple[list[int], Tensor] | None:
        """Return positions and norms, ``(n,)`` on the CPU, of the context's gradients, if it has any."""
        positions, norms = [], []
        for position, gradient in self._gradients(context_id):
            positions.append(position)
            norms.append(_norm(gradient, norm_type).cpu())
        return (positions, torch.stack(norms)) if norms else None

    def scale_gradients(self, context_id: int, factor: Tensor) -> None:
        """Multiply the context's gradients by a scalar, in place."""
        for _, gradient in self._gradients(context_id):
            gradient.mul_(factor.to(gradient.device))

    def save(self, changes: Mapping[int, Options]) -> Saved:
        """Return state and options. State that belongs to no parameter has no place in it and is refused."""
        with self._exclusive():
            self._set_options(changes)
            numbered: dict[Any, Any] = self.optimizer.state_dict()["state"]
            options = self._options()
        positions = list(self._positions.values())
        homeless = [key for key in numbered if not isinstance(key, int)]
        if homeless:
            raise TypeError(
                f"{type(self.optimizer).__name__} keeps state that is of no parameter: {homeless}"
            )
        return Saved({positions[number]: moved(state, "cpu") for number, state in numbered.items()}, options)

    def load(self, saved: Saved) -> None:
        """Replace state and options by what :meth:`save` returned, or would have."""
        number = {position: number for number, position in enumerate(self._positions.values())}
        with self._exclusive():
            counter = itertools.count()
            groups = [
                {**saved.options[group], "params": [next(counter) for _ in known["params"]]}
                for group, known in zip(self._places, self.optimizer.param_groups, strict=True)
            ]
            state = {number[position]: state for position, state in saved.state.items()}
            self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    # --- details ---

    def _exclusive(self) -> AbstractContextManager[None]:
        return PARAMETER_LOCKS.held(self._locks)

    def _options(self) -> dict[int, Options]:
        groups = self.optimizer.param_groups
        return {
            group: moved({key: value for key, value in groups[place].items() if key != "params"}, "cpu")
            for group, place in self._places.items()
        }

    def _set_options(self, changes: Mapping[int, Options]) -> None:
        """Set options by group; those of groups that have no part here are not for us."""
        for group in changes.keys() & self._places.keys():
            known = self.optimizer.param_groups[self._places[group]]
            for key, value in changes[group].items():
                if isinstance(value, Tensor) and isinstance(known.get(key), Tensor):
                    known[key].copy_(value)  # keeps its device; optimizers may hold on to the tensor
                else:
                    known[key] = value

    def _gradients(self, context_id: int) -> Iterator[tuple[int, Tensor]]:
        """Yield position and gradient of each parameter that has one in the context."""
        gradients = _gradients_here(context_id)
        for parameter, position in self._positions.items():
            if parameter in gradients:
                yield position, gradients[parameter]


def _gradients_here(context_id: int) -> Mapping[Tensor, Tensor]:
    """The context's gradients here; none if it never came here (the caller has checked that it exists)."""
    try:
        return get_gradients(context_id)
    except AutogradError:
        return {}


@contextmanager
def _lent_gradients(parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Let ``.grad`` be the context's gradient (or None) inside, and what it was before afterwards.

    The parameters' locks must be held.
    """
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = gradients.get(parameter)
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    """Return the norm of all elements; rows that a sparse gradient has twice count once, added up."""
    if gradient.layout is torch.sparse_coo:
        gradient = gradient.coalesce().values()
    if not gradient.numel():
        return gradient.new_zeros(())
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm


# --- the calls ---


def new_local_optimizer(
    optimizer_class: type[optim.Optimizer],
    parts: Sequence[GroupPart],
    grouped: bool,
    args: tuple[Any, ...],
    kwargs: Options,
) -> Made:
    """Create a local optimizer here and hand out a reference to it."""
    optimizer = LocalOptimizer(optimizer_class, parts, grouped, args, kwargs)
    return optimizer.made(RRef(optimizer))


def call_local_optimizer(rref: RRef[LocalOptimizer], method: str, args: tuple[Any, ...]) -> Any:
    """Run a method of a local optimizer here, where it lives."""
    return getattr(rref.local_value(), method)(*args)
