"""Parameter groups of RRefs: read as a user gives them, split by owner, compared.

For ``mpirpc.optim``. A group is a dict as in ``torch.optim``: RRefs under ``params``, and options (learning
rate and the like). A parameter's *position* is its place among all that were given, group after group.

Rules for this file: public API only; it calls nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpirpc.api import WorkerInfo
from mpirpc.local_optimizer import GroupPart
from mpirpc.rref import RRef

__all__ = ["Group", "differences", "is_known", "options_of", "read_group", "read_groups", "split_by_owner"]

Group = dict[str, Any]


def read_groups(params_rref: Iterable[Any]) -> tuple[list[Group], bool]:
    """Return the groups, and whether they were given as groups.

    Raises:
        TypeError: A group is no dict with parameters, or a parameter is no RRef.
        ValueError: There is no parameter.
    """
    given = list(params_rref)
    if not given:
        raise ValueError("params_rref is empty: there is nothing to optimize")
    if not isinstance(given[0], Mapping):
        return [read_group({"params": given}, "params_rref")], False
    groups = [read_group(group, f"params_rref[{index}]") for index, group in enumerate(given)]
    if not any(group["params"] for group in groups):
        raise ValueError("params_rref has empty groups only: there is nothing to optimize")
    return groups, True


def read_group(group: object, name: str) -> Group:
    """Check a group that the user calls ``name``, and return it with a list of RRefs."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(f"{name} must be a parameter group, a dict with 'params', not {group!r}")
    params = [group["params"]] if isinstance(group["params"], RRef) else group["params"]
    if isinstance(params, (set, frozenset)):
        raise TypeError(f"{name} has its parameters in a set, which has no order\nhint: use a list")
    params = list(params)
    within = name if name == "params_rref" else f"{name}['params']"
    for index, rref in enumerate(params):
        if not isinstance(rref, RRef):
            raise TypeError(f"{within}[{index}] must be an RRef to a parameter, not {type(rref).__name__}")
    return {**group, "params": params}


def split_by_owner(
    groups: Sequence[Group], first_group: int, first_position: int = 0
) -> dict[WorkerInfo, list[GroupPart]]:
    """Return each owner's parts of the groups; owners in order of first appearance."""
    parts: dict[WorkerInfo, list[GroupPart]] = {}
    position = first_position
    for number, group in enumerate(groups, first_group):
        params: dict[WorkerInfo, list[tuple[int, RRef[Any]]]] = {}
        for rref in group["params"]:
            params.setdefault(rref.owner(), []).append((position, rref))
            position += 1
        for owner, placed in params.items():
            parts.setdefault(owner, []).append(GroupPart(number, tuple(placed), options_of(group)))
    return parts


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def is_known(options: Mapping[str, Any], key: str, value: Any) -> bool:
    """Say whether ``options`` has exactly this value."""
    if key not in options:
        return False
    known = options[key]
    if type(known) is not type(value):
        return False
    if not isinstance(value, Tensor):
        return bool(known == value)
    return value.dtype == known.dtype and value.device == known.device and torch.equal(known, value)


def differences(made_from: Mapping[str, Any], name: str, shapes: Mapping[int, Any]) -> Iterator[str]:
    """Compare what a state says of its optimizer, if it says it, with this optimizer."""
    if made_from.get("optimizer", name) != name:
        yield f"state of {made_from['optimizer']}; this is {name}"
    theirs = made_from.get("shapes", [])
    for number, (their, (_, our)) in enumerate(zip(theirs, sorted(shapes.items()), strict=False)):
        if tuple(their) != our:
            yield f"parameter {number} of shape {tuple(their)}; here it has {our}"
