"""Every test of torch's RPC suite: what it is about, whether it can apply to mpirpc, and choosing among them.

A test applies when a Python implementation over MPI could pass it on CPU: not those for CUDA, TensorPipe's
internals, or TorchScript programs that make RPCs themselves.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

SUITE_FILE = Path(__file__).with_name("suite.csv")

QUICK = (
    r"^RpcTest\.test_(add|nonzero|nested_rpc|py_raise_in_user_func|rpc_timeouts|wait_all|all_gather|rpc_barrier_all)$",
    r"^RpcTest\.test_(async_function_nested|callback_chain|py_rref_args_user_share|rref_proxy_class|user_rref_backward)$",
    r"^RpcTest\.test_(nested_rref|rref_forward_chain|multi_py_udf_remote|invalid_names|shutdown_followed_by_rpc)$",
    r"^DistAutogradTest\.test_(autograd_context|backward_simple|nested_context|graph_for_py_nested_call)$",
    r"^DistOptimizerTest\.test_dist_optim$",
)
"""Patterns of the tests that a plain pytest run executes: some of each kind, all on 4 ranks."""


_DYNAMIC = "TensorPipeAgentRpcTest.test_dynamic_"
_ONE_BY_ONE = "not run: ranks that join one after another are not provided, init_rpc waits for all of them"
NOT_RUN = {
    _DYNAMIC + "and_static_init_rpc_together": _ONE_BY_ONE,
    _DYNAMIC + "rpc_existing_rank_can_communicate_with_new_rank": _ONE_BY_ONE,
    _DYNAMIC + "rpc_new_rank_can_communicated_with_existing_rank": _ONE_BY_ONE,
}
"""Tests that fail without being run, since they would wait for ever."""


class Test(NamedTuple):
    """One test of the suite."""

    name: str
    """``Class.test_method``."""
    ranks: int
    category: str
    applies: bool
    about: str


def read_suite() -> dict[str, Test]:
    """Return all tests by name, in the suite's order."""
    with SUITE_FILE.open(encoding="utf-8") as file:
        return {
            row["test"]: Test(
                row["test"], int(row["ranks"]), row["category"], row["applicable"] == "yes", row["reason"]
            )
            for row in csv.DictReader(file)
        }


def choose(
    suite: Mapping[str, Test],
    patterns: Sequence[str] = (),
    categories: Sequence[str] = (),
    inapplicable_too: bool = False,
) -> list[Test]:
    """Return the tests whose name matches a pattern (or all) and whose category is named (or all)."""
    return [
        test
        for test in suite.values()
        if (test.applies or inapplicable_too)
        and (not patterns or any(re.search(pattern, test.name) for pattern in patterns))
        and (not categories or test.category in categories)
    ]
