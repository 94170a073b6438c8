"""Whether somebody watches: is the output of this command shown on a terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def terminal() -> TextIO | None:
    """Return the stream that leads to a terminal, standard error first; None if the output goes elsewhere.

    Open MPI's ``mpirun`` gives ranks a terminal of its own as standard output even when its output goes to a
    file: where it goes is seen by looking at the launcher, which is this process's parent on the first host.
    """
    streams = [stream for stream in (sys.stderr, sys.stdout) if stream.isatty()]
    if not streams or not _launcher_has_terminal():
        return None
    return streams[0]


def _launcher_has_terminal() -> bool:
    """Say whether the parent's standard output is a terminal; yes if that cannot be found out."""
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    except OSError:
        return True
