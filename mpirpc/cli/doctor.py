"""``python -m mpirpc doctor``: can a job run here, as it was started, and what is to be mended if not.

Alone it looks at this machine; under ``mpirun`` or ``srun`` at the whole job, and then it makes calls
between the ranks. The facts are gathered by :mod:`mpirpc.cli.doctor_facts`, judged by
:mod:`mpirpc.cli.doctor_checks`, and printed here by rank 0.

Rules for this file: public API only.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

import mpirpc
from mpirpc.cli.doctor_checks import FAULT, LEVELS, NOTE, OK, WARNING, Facts, Finding, find_all, size_text
from mpirpc.cli.doctor_facts import agree, gather_facts

HELP = "look at MPI, launcher and machine, make some calls, and say how to mend what is wrong"

ECHO_NBYTES = 64 << 20
SMALL_CALLS = 200
SLOW_CALL = 2e-3
"""Median seconds of a small call above which something is badly set up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the report")
    parser.add_argument("--no-calls", action="store_true", help="look only, make no calls")
    parser.add_argument(
        "--timeout", type=float, default=120, metavar="SECONDS", help="give up after this time (120)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Look at the job on all ranks.

    Returns:
        Exit status, the same on all ranks: 0, or 1 if a job would not work.
    """
    faulthandler.dump_traceback_later(arguments.timeout, exit=True)  # ends this process with status 1
    rank, everyone = gather_facts()
    findings = find_all(everyone)
    usable = not any(finding.level == FAULT for finding in findings)
    if usable and not arguments.no_calls:
        findings += _try_calls(len(everyone), arguments.timeout)
    status = int(any(finding.level == FAULT for finding in findings))
    if rank == 0:
        print(as_json(everyone, findings) if arguments.json else as_report(everyone, findings), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return agree(status)


# --- calls ---


def _try_calls(num_ranks: int, limit: float) -> list[Finding]:
    """Start RPC and try it out. Only what rank 0 finds counts."""
    try:
        mpirpc.init_rpc(rpc_backend_options=mpirpc.MPIRpcBackendOptions(rpc_timeout=limit))
    except mpirpc.RpcError as error:
        return [Finding(FAULT, "init_rpc", error.message, error.hint)]
    try:
        return _calls(num_ranks) if mpirpc.get_worker_info().id == 0 else []
    except Exception as error:
        return [Finding(FAULT, "calls", f"a call failed: {type(error).__name__}: {error}", REPORT)]
    finally:
        mpirpc.shutdown()


REPORT = "please report it, with the output of python -m mpirpc doctor --json"


def _calls(num_ranks: int) -> list[Finding]:
    """A call to each rank, a large echo and many small calls to the last one."""
    answers = [mpirpc.rpc_sync(rank, _answer, args=(rank,)) for rank in range(num_ranks)]
    if answers != list(range(num_ranks)):
        return [Finding(FAULT, "calls", f"wrong answers: {answers}", REPORT)]
    last = num_ranks - 1
    sent = torch.arange(ECHO_NBYTES // 8)
    start = time.perf_counter()
    received = mpirpc.rpc_sync(last, _echo, args=(sent,))
    seconds = time.perf_counter() - start
    if not torch.equal(sent, received):
        return [Finding(FAULT, "calls", f"a tensor of {size_text(ECHO_NBYTES)} came back changed", REPORT)]
    times = [_time_of_a_call(last) for _ in range(SMALL_CALLS)]
    median = statistics.median(times)
    rate = size_text(int(2 * ECHO_NBYTES / seconds))
    return [
        Finding(OK, "calls", f"all {num_ranks} rank(s) answer"),
        Finding(
            OK, "large call", f"{size_text(ECHO_NBYTES)} to rank {last} and back in {seconds:.2f} s, {rate}/s"
        ),
        _latency(last, median),
    ]


def _latency(rank: int, median: float) -> Finding:
    text = f"{median * 1e6:.0f} us to rank {rank} and back (median of {SMALL_CALLS})"
    if median <= SLOW_CALL:
        return Finding(OK, "small call", text)
    mend = "ranks may share cores: see 'cores' above; with Open MPI try OMPI_MCA_mpi_yield_when_idle=1"
    return Finding(WARNING, "small call", text, mend)


def _time_of_a_call(rank: int) -> float:
    start = time.perf_counter()
    mpirpc.rpc_sync(rank, _answer, args=(rank,))
    return time.perf_counter() - start


def _answer(expected: int) -> int:
    """At the callee: say which rank it is; -1 if it is not the expected one."""
    rank = mpirpc.get_worker_info().id
    return rank if rank == expected else -1


def _echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# --- the report ---


def as_report(everyone: Sequence[Facts], findings: Sequence[Finding]) -> str:
    """The findings for people, and a last line that says what they come to."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<7}  {finding.subject:<{width}}  {finding.text}")
        if finding.mend:
            lines.append(f"{'':<7}  {'':<{width}}  hint: {finding.mend}")
    variables = everyone[0].environ
    if variables:
        lines += ["", "set on rank 0: " + " ".join(f"{name}={value}" for name, value in variables.items())]
    return "\n".join([*lines, "", _verdict(findings)])


def _verdict(findings: Sequence[Finding]) -> str:
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    if counts[FAULT]:
        return f"doctor: {counts[FAULT]} fault(s): a job started like this would not work"
    rest = f"{counts[WARNING]} warning(s), {counts[NOTE]} note(s)"
    return f"doctor: a job started like this works; {rest}"


def as_json(everyone: Sequence[Facts], findings: Sequence[Finding]) -> str:
    """All that is known, for programs: ``ok``, ``findings``, ``ranks``."""
    return json.dumps(
        {
            "ok": not any(finding.level == FAULT for finding in findings),
            "findings": [finding.as_dict() for finding in findings],
            "ranks": [{**asdict(facts), "launcher": facts.launcher.name} for facts in everyone],
        },
        indent=1,
    )
