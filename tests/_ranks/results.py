"""What an MPI suite found out, written by rank 0 line by line, so that a broken-off run tells what it knew.

One JSON object a line: ``{"started": id}``, then ``{"nodeid": id, "outcome": ..., "text": ..., "seconds":
...}``, and at the very end ``{"finished": exit status}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "MPIRPC_TEST_RESULTS"
"""Environment variable: the file to write; unset: none is written."""


@dataclass(frozen=True)
class Result:
    """How one test went, all its phases and all ranks together."""

    nodeid: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


@dataclass
class Results:
    """A results file read back."""

    tests: list[Result] = field(default_factory=list)
    running: str = ""
    """The test that had started and not ended when the run broke off."""
    finished: int | None = None
    """Exit status of the inner run; None if it broke off."""


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line; closing the file after each keeps it readable whatever happens next."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> Results:
    """Read a results file; a missing one is an empty one, for a run that never began."""
    results = Results()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for record in map(json.loads, lines):
        if "started" in record:
            results.running = record["started"]
        elif "finished" in record:
            results.finished = record["finished"]
        else:
            results.tests.append(Result(**record))
            results.running = ""
    return results
