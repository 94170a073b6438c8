"""``DistributedOptimizer``: any ``torch.optim`` class over parameters that live on several workers.

The caller keeps one RRef per owner of parameters; behind each is a *local optimizer*
(``mpirpc.local_optimizer``), made and stepped there by RPC. Gradients never travel: each owner takes its own
out of the autograd context. Options (learning rate and the like) live at the caller, in ``param_groups`` as
with ``torch.optim``; what has changed there goes along with the next step.

Rules for this file: public API only. Whatever is to happen on every owner goes through :func:`_at_owners`,
which waits for all and reports all failures together.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, optim

from mpirpc.api import WorkerInfo, rpc_async
from mpirpc.autograd import get_gradients
from mpirpc.errors import AutogradError, OptimizerError
from mpirpc.local_optimizer import (
    LocalOptimizer,
    Made,
    Saved,
    call_local_optimizer,
    new_local_optimizer,
)
from mpirpc.moving import moved
from mpirpc.param_groups import (
    Group,
    differences,
    is_known,
    options_of,
    read_group,
    read_groups,
    split_by_owner,
)
from mpirpc.rref import RRef

__all__ = ["DistributedOptimizer"]

_T = TypeVar("_T")


class DistributedOptimizer(optim.Optimizer):
    """Optimize parameters where they live: one local ``torch.optim`` optimizer at each owner.

    The constructor waits for every owner: afterwards all local optimizers exist, or it has raised. Steps of
    several optimizers that share a parameter, from any worker, take turns at its owner. There is no common
    order between owners, and steps are not kept apart from forward and backward passes of others:
    asynchronous training is allowed, and the caller's to arrange. A step takes the gradients of one autograd
    context, so concurrent trainers never mix theirs, and ``.grad`` of the parameters is afterwards what it
    was before.

    It is a ``torch.optim.Optimizer`` by what it offers: schedulers of ``torch.optim.lr_scheduler`` take it as
    it is, and its hooks run at the caller. Sent to another worker by RPC it arrives as a handle to the same
    local optimizers, with ``param_groups`` of its own from then on.

    Args:
        optimizer_class: Class to create at each owner: any subclass of ``torch.optim.Optimizer`` whose
            ``step`` needs no closure.
        params_rref: RRefs to the parameters (leaf tensors), each a single tensor; or parameter groups as in
            ``torch.optim``, dicts with the RRefs under ``"params"`` and options of the group. A second RRef
            to the same parameter counts for nothing inside a group, and is refused in another.
        args: Further arguments of ``optimizer_class``, after the parameters.
        kwargs: Keyword arguments of ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class or needs a closure (``LBFGS`` does, which
            evaluates the model several times in one step), or something in ``params_rref`` is no RRef.
        ValueError: ``params_rref`` is empty.
        OptimizerError: Some owner could not create its optimizer; every such owner and its error is named.

    Attributes:
        remote_optimizers: One RRef per owner, in the order in which ``params_rref`` names the owners first.
        param_groups: The groups as in ``torch.optim``, with RRefs for parameters. Options that are changed
            here, by hand or by a scheduler, reach the owners with the next step.
        defaults: The options that a group has if it names none.
        state: Empty: the state lives at the owners, see :meth:`state_dict`.

    Thread: any.   Progress: waits for remote progress.

    Example::

        with autograd.context() as context_id:
            loss = criterion(model(inputs), targets)
            autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    def __init__(
        self,
        optimizer_class: type[optim.Optimizer],
        params_rref: Iterable[RRef[Any]] | Iterable[Mapping[str, Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _check_optimizer_class(optimizer_class)
        groups, grouped = read_groups(params_rref)
        self._name = optimizer_class.__name__
        self._recipe = (optimizer_class, args, kwargs)
        calls = [
            (owner, new_local_optimizer, (optimizer_class, parts, grouped, args, kwargs))
            for owner, parts in split_by_owner(groups, 0).items()
        ]
        made = _at_owners(f"creating {self._name}", calls)
        self.remote_optimizers: list[RRef[LocalOptimizer]] = []
        # Per remote optimizer: position -> shape of its parameters. Changed by add_param_group only.
        self._shapes: list[dict[int, tuple[int, ...]]] = []
        # Per group: what the owners know of its options. Changed under _options_mutex.
        self._known: list[dict[str, Any]] = []
        self._num_positions = 0
        self.__setstate__({"defaults": dict(made[0].defaults), "state": {}, "param_groups": []})
        for answer in made:
            self.remote_optimizers.append(answer.optimizer)
            self._shapes.append(answer.shapes)
        for group in groups:
            self._note_group(group, made)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_name", "_recipe", "remote_optimizers", "_shapes", "_known", "_num_positions")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # also what Optimizer's constructor does besides taking tensors
        self._options_mutex = Lock()  # held during a call that brings changed options to the owners

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._name}, {len(self.remote_optimizers)} owners)"

    # --- steps ---

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Apply the gradients of one autograd context to the parameters, on all owners at once.

        A parameter without a gradient in the context stays as it is, as with ``.grad is None`` in
        ``torch.optim``. The owners that succeed are stepped even if another fails.

        Args:
            context_id: The context whose backward pass is over; it must still be open.

        Raises:
            AutogradError: This worker knows no such context.
            OptimizerError: Some owner's step failed; every such owner and its error is named.

        Thread: any.   Progress: waits for remote progress.
        """
        _check_context(context_id)
        self._call_with_options("step", context_id)

    def clip_grad_norm(
        self, context_id: int, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale a context's gradients down so that their norm over all parameters is at most ``max_norm``.

        ``torch.nn.utils.clip_grad_norm_``, over all parameters of this optimizer on all owners, with the
        same result. The gradients are changed in the context, in place. A parameter that is shared counts
        once; rows of a sparse gradient that are there twice are added up first.

        Args:
            context_id: The context whose backward pass is over.
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; ``inf`` for the largest element.
            error_if_nonfinite: Raise, and scale nothing, if the norm is infinite or not a number.

        Returns:
            The norm before: a scalar on the CPU, 0 if no parameter has a gradient.

        Raises:
            AutogradError: This worker knows no such context, or the norm is not finite.
            OptimizerError: It failed on some owner; every such owner and its error is named.

        Thread: any.   Progress: waits for remote progress.
        """
        _check_context(context_id)
        norms: dict[int, Tensor] = {}
        for found in self._call_all("gradient_norms", context_id, float(norm_type)):
            if found is not None:
                norms.update(zip(*found, strict=True))
        if not norms:
            return torch.tensor(0.0)
        # summed up in the order of the parameters, as in one process: the same to the last bit
        total: Tensor = torch.linalg.vector_norm(
            torch.stack([norms[at] for at in sorted(norms)]), float(norm_type)
        )
        if error_if_nonfinite and not total.isfinite():
            raise AutogradError(
                f"the gradients of context {context_id} cannot be clipped: their norm of order {norm_type} "
                f"is non-finite ({total.item()})",
                "with error_if_nonfinite=False they are scaled by it all the same",
            )
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        if factor != 1:
            self._call_all("scale_gradients", context_id, factor)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of all parameters at their owners.

        Distributed autograd needs none of it: its gradients live in contexts, each new and empty. It is for
        parameters that also take part in backward passes of plain autograd at their owner, or in DDP.

        Args:
            set_to_none: Drop the gradients; else they are filled with zeros.

        Raises:
            OptimizerError: It failed on some owner; every such owner and its error is named.

        Thread: any.   Progress: waits for remote progress.
        """
        self._call_all("zero_grad", set_to_none)

    # --- groups and options ---

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a parameter group: a dict with RRefs under ``"params"``, and options.

        Owners that have a local optimizer take it in, others make one. Not while another thread uses this
        optimizer.

        Raises:
            TypeError: It is no dict, or something in ``"params"`` is no RRef.
            OptimizerError: It failed on some owner; every such owner and its error is named. Then this
                optimizer is of no use any more.

        Thread: any.   Progress: waits for remote progress.
        """
        number = len(self.param_groups)
        group = read_group(param_group, f"param_groups[{number}]")
        optimizer_class, args, kwargs = self._recipe
        known = {rref.owner().id: rref for rref in self.remote_optimizers}
        calls: list[tuple[WorkerInfo, Callable[..., Made], tuple[Any, ...]]] = []
        for owner, (part,) in split_by_owner([group], number, self._num_positions).items():
            if owner.id in known:
                calls.append((owner, call_local_optimizer, (known[owner.id], "add_group", (part,))))
            else:
                calls.append((owner, new_local_optimizer, (optimizer_class, [part], True, args, kwargs)))
        made = _at_owners(f"adding a parameter group to {self._name}", calls)
        owners = [rref.owner().id for rref in self.remote_optimizers]
        for (owner, _, _), answer in zip(calls, made, strict=True):
            if owner.id in known:
                self._shapes[owners.index(owner.id)].update(answer.shapes)
            else:
                self.remote_optimizers.append(answer.optimizer)
                self._shapes.append(answer.shapes)
        self._note_group(group, made)

    def _note_group(self, group: Group, made: Sequence[Made]) -> None:
        """Add a group to ``param_groups``, with all its options and without parameters named twice."""
        number, first = len(self.param_groups), self._num_positions
        self._num_positions += len(group["params"])
        kept = set[int]().union(*(answer.shapes for answer in made))
        params = [rref for position, rref in enumerate(group["params"], first) if position in kept]
        at_owners = [answer.options[number] for answer in made if number in answer.options]
        options = at_owners[0] if at_owners else {**self.defaults, **options_of(group)}
        self.param_groups.append({"params": params, **options})
        self._known.append(copy.deepcopy(options))

    def _call_with_options(self, method: str, *args: Any) -> list[Any]:
        """Run a method of every local optimizer that takes changed options first."""
        with self._options_mutex:
            changes = self._changed_options()
            if changes:
                for number, options in changes.items():
                    for key in options:
                        self._known[number].pop(key, None)  # if this fails, nobody knows who has which
                results = self._call_all(method, moved(changes, "cpu"), *args)
                for number, options in changes.items():
                    self._known[number].update(options)
                return results
        return self._call_all(method, changes, *args)

    def _changed_options(self) -> dict[int, dict[str, Any]]:
        """Return, by group, copies of the options that the owners do not know yet."""
        changes = {}
        for number, (group, known) in enumerate(zip(self.param_groups, self._known, strict=True)):
            options = options_of(group)
            new = {
                key: copy.deepcopy(options[key]) for key in options if not is_known(known, key, options[key])
            }
            if new:
                changes[number] = new
        return changes

    # --- the whole state ---

    def state_dict(self) -> dict[str, Any]:
        """Fetch the state of all local optimizers into one dict that ``torch.save`` can store.

        It has the form of ``torch.optim``: parameters are numbered in the order in which they were given.
        So it can be loaded by an optimizer over the same parameters in the same order, wherever these live:
        in a job with other workers, or in ``torch.optim`` in one process. Under ``"mpirpc"`` it says what it
        was made from, for :meth:`load_state_dict` to check. If steps are made through this optimizer
        meanwhile, parts may be of different steps.

        Returns:
            A dict of dicts, lists, numbers and tensors on the CPU.

        Raises:
            OptimizerError: Some owner failed; every such owner and its error is named.
            ValueError: The optimizer class changes options by itself, and owners differ in one.

        Thread: any.   Progress: waits for remote progress.   Copies: one, by the network.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        saved: list[Saved] = self._call_with_options("save")
        number = self._numbers()
        state = {number[at]: value for part in saved for at, value in part.state.items()}
        groups, first = [], 0
        for index, group in enumerate(self.param_groups):
            options = {**options_of(group), **self._agreed(index, saved)}
            groups.append({**options, "params": list(range(first, first + len(group["params"])))})
            first += len(group["params"])
        shapes = [list(shape) for _, shape in sorted(self._all_shapes().items())]
        result: dict[str, Any] = {
            "state": dict(sorted(state.items())),
            "param_groups": copy.deepcopy(groups),
            "mpirpc": {"optimizer": self._name, "shapes": shapes},
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring a state back that :meth:`state_dict`, or ``torch.optim`` over the same parameters, returned.

        It is checked before anything is changed. Options of the groups are loaded too, here and at the
        owners.

        Args:
            state_dict: Not changed.

        Raises:
            ValueError: It does not fit: of another optimizer class, with other groups, or for parameters of
                other shapes. All that differs is listed.
            OptimizerError: Some owner failed; every such owner and its error is named.

        Thread: any.   Progress: waits for remote progress.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._check_fits(state_dict)
        position = dict(
            zip(
                (key for group in state_dict["param_groups"] for key in group["params"]),
                self._numbers(),
                strict=True,
            )
        )
        options = {index: options_of(group) for index, group in enumerate(state_dict["param_groups"])}
        state = {position[key]: moved(value, "cpu") for key, value in state_dict["state"].items()}
        calls = []
        for rref, shapes in zip(self.remote_optimizers, self._shapes, strict=True):
            saved = Saved({at: state[at] for at in shapes if at in state}, moved(options, "cpu"))
            calls.append((rref.owner(), call_local_optimizer, (rref, "load", (saved,))))
        with self._options_mutex:
            _at_owners(f"loading the state of {self._name}", calls)
            for index, group in enumerate(self.param_groups):
                params = group["params"]
                group.clear()
                group.update(params=params, **copy.deepcopy(options[index]))
                self._known[index] = copy.deepcopy(options[index])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _all_shapes(self) -> dict[int, tuple[int, ...]]:
        return {position: shape for shapes in self._shapes for position, shape in shapes.items()}

    def _numbers(self) -> dict[int, int]:
        """Position -> number of every parameter, in order; they differ once parameters were named twice."""
        return {position: number for number, position in enumerate(sorted(self._all_shapes()))}

    def _agreed(self, index: int, saved: Sequence[Saved]) -> dict[str, Any]:
        """Return a group's options as its owners have them; all must have the same."""
        at_owners = [part.options[index] for part in saved if index in part.options]
        for other in at_owners[1:]:
            for key, value in at_owners[0].items():
                if not is_known(other, key, value):
                    raise ValueError(
                        f"the state does not go into one dict: option {key!r} of parameter group {index} is "
                        f"{value!r} at one owner and {other.get(key)!r} at another"
                    )
        return at_owners[0] if at_owners else {}

    def _check_fits(self, state_dict: Mapping[str, Any]) -> None:
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(f"this is no state of an optimizer: it has no {' and no '.join(missing)}")
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        faults = list(differences(state_dict.get("mpirpc", {}), self._name, self._all_shapes()))
        if ours != theirs:
            faults.append(f"groups of {theirs} parameters; this optimizer has groups of {ours}")
        known = {key for group in state_dict["param_groups"] for key in group["params"]}
        faults += [
            f"state of a parameter {key!r} in no group" for key in state_dict["state"] if key not in known
        ]
        if faults:
            raise ValueError("\n  ".join(["the state does not fit this optimizer:", *faults]))

    # --- calls ---

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Run a method of every local optimizer; results in the order of ``remote_optimizers``."""
        rrefs = self.remote_optimizers
        calls = [(rref.owner(), call_local_optimizer, (rref, method, args)) for rref in rrefs]
        return _at_owners(f"{method} of {self._name}", calls)


# --- arguments ---


def _check_optimizer_class(optimizer_class: object) -> None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a torch.optim.Optimizer class, not {optimizer_class!r}")
    _, *parameters = inspect.signature(optimizer_class.step).parameters.values()
    if any(p.name == "closure" and p.default is p.empty for p in parameters):
        raise TypeError(
            f"{optimizer_class.__name__} cannot be distributed: its step() needs a closure that evaluates "
            "the whole model again, and each owner holds only a part of it\n"
            "hint: use an optimizer that works from gradients alone, such as SGD, Adam or Adagrad"
        )


def _check_context(context_id: int) -> None:
    """Raise for an unknown context, which an owner could not tell from one that never came there."""
    get_gradients(context_id)


# --- all owners ---


def _at_owners(what: str, calls: Sequence[tuple[WorkerInfo, Callable[..., _T], tuple[Any, ...]]]) -> list[_T]:
    """Run one call per owner at the same time, and wait for all of them, also when some fail."""
    futures = [(owner, rpc_async(owner, function, args=args)) for owner, function, args in calls]
    results: list[_T] = []
    failures: list[tuple[str, Exception]] = []
    for owner, future in futures:
        try:
            results.append(future.wait())
        except Exception as error:
            failures.append((str(owner), error))
    if failures:
        lines = [f"{what} failed on {len(failures)} of {len(calls)} workers"]
        lines += [f"  {worker}: {type(error).__name__}: {error}" for worker, error in failures]
        raise OptimizerError("\n".join(lines), failures=failures) from failures[0][1]
    return results
