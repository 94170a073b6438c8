"""``python -m tests.conformance``: run torch's RPC suite against mpirpc.

Without arguments a quick part of it. The exit status is 0 if no test is worse than recorded.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from tests.conformance.job import Outcome
from tests.conformance.outcomes import (
    Recorded,
    improvements,
    read_record,
    regressions,
    table,
    updated,
    write_record,
)
from tests.conformance.plan import QUICK, Test, choose, read_suite
from tests.conformance.runner import Runner


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("patterns", nargs="*", help="regular expressions on Class.test_method")
    parser.add_argument("--all", action="store_true", help="every test that applies")
    parser.add_argument("--category", action="append", default=[], help="only this category (repeatable)")
    parser.add_argument("--inapplicable", action="store_true", help="also tests that cannot apply")
    parser.add_argument("--timeout", type=float, default=100, help="seconds per test (100)")
    parser.add_argument("--no-retry", action="store_true", help="no second try in a new job")
    parser.add_argument("--record", action="store_true", help="write the outcomes to outcomes.csv")
    return parser.parse_args(argv)


def chosen_tests(args: argparse.Namespace, suite: dict[str, Test]) -> list[Test]:
    """Return the tests that the command line asks for."""
    asked = args.all or args.patterns or args.category
    return choose(suite, args.patterns if asked else QUICK, args.category, args.inapplicable)


def main(argv: list[str] | None = None) -> int:
    """Run, print, record; return the exit status."""
    args = parse_args(argv)
    suite, recorded = read_suite(), read_record()
    tests = chosen_tests(args, suite)
    outcomes: dict[str, Outcome] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def note(test: Test, outcome: Outcome) -> None:
        outcomes[test.name] = outcome
        print(
            f"{len(outcomes):>4}/{len(tests)} {outcome.status:<5} {outcome.seconds:>5.1f}s {test.name} "
            f"{outcome.error[:150]}",
            flush=True,
        )
        if args.record:
            write_record(suite, updated(recorded, {n: o for n, o in outcomes.items() if suite[n].applies}))

    started = time.monotonic()
    expected = [name for name, row in recorded.items() if row.status != "pass"]
    runner = Runner(args.timeout, not args.no_retry, expected, note)
    print(f"{len(tests)} tests, logs in {runner.logs}", flush=True)
    runner.run(tests)
    report(suite, recorded, outcomes, runner, time.monotonic() - started)
    return int(bool(regressions(recorded, outcomes)) or len(outcomes) < len(tests))


def report(
    suite: dict[str, Test],
    recorded: dict[str, Recorded],
    outcomes: dict[str, Outcome],
    runner: Runner,
    seconds: float,
) -> None:
    """Print counts, and what is not as recorded."""
    print("\n" + table(suite, outcomes))
    print(f"\n{runner.num_jobs} jobs, {runner.bad_exits} of them did not exit by themselves, {seconds:.0f} s")
    sections = {
        "private names that the suite imports and nobody provides": runner.missing,
        "tests of the installed suite that suite.csv does not know": sorted(set(runner.suite) - set(suite)),
        "pass only as the first test of a job": [f"{n}: {e[:120]}" for n, e in runner.only_alone.items()],
        "pass now, were recorded as bad": improvements(recorded, outcomes),
        "WORSE THAN RECORDED": [f"{n}: {outcomes[n].error[:150]}" for n in regressions(recorded, outcomes)],
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())
