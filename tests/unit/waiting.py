"""Waiting for what other threads of the library are about to do."""

import time
from collections.abc import Callable

LIMIT = 30.0
"""Seconds after which it is not going to happen."""


def until(look: Callable[[], object]) -> None:
    """Wait until ``look()`` is true; fail if it never is."""
    deadline = time.monotonic() + LIMIT
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.001)
