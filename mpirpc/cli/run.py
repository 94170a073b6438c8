"""``mpirun -n 4 python -m mpirpc run script.py``: run a program on every rank.

The program sees mpirpc under the names of ``torch.distributed.rpc`` (:mod:`mpirpc.dropin`), and its end is
looked after (:mod:`mpirpc.launch`). What runs is what ``python script.py`` or ``python -m module`` would
run.

Rules for this file: public API only.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

from mpirpc import dropin, launch

HELP = "run a program, also one written for torch.distributed.rpc, and end the job if a rank fails"

NO_PROGRAM = """\
no program was given
hint: mpirun -n 4 python -m mpirpc run script.py"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``run``."""
    parser.usage = (
        "%(prog)s [options] [--] script.py [arguments]  |  %(prog)s [options] -m module [arguments]"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    parser.add_argument(
        "--keep-torch",
        action="store_true",
        help="leave torch.distributed.rpc and torch.multiprocessing alone",
    )
    parser.add_argument(
        "--signal", action="append", default=[], metavar="NAME", help="another signal to end by, as USR1"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=launch.DEFAULT_GRACE,
        metavar="SECONDS",
        help=f"longest time from a signal to the end ({launch.DEFAULT_GRACE:g})",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the program on this rank.

    Returns:
        Exit status: 0, or 2 without a program. Other ends, see :mod:`mpirpc.launch`, do not come back here.
    """
    words = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not words:
        print(NO_PROGRAM, file=sys.stderr)
        return 2
    main = partial(_run_module if arguments.is_module else _run_script, words, arguments.keep_torch)
    launch.run_main(main, signals=arguments.signal, grace=arguments.grace)
    return 0


def _run_module(words: Sequence[str], keep_torch: bool) -> None:
    """Do what ``python -m`` does."""
    _prepare(keep_torch)
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_script(words: Sequence[str], keep_torch: bool) -> None:
    """Do what ``python script.py`` does.

    The program's module stays ``__main__`` afterwards: other ranks may still call its functions.
    """
    _prepare(keep_torch)
    path = Path(words[0])
    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        sys.argv[:] = words
        runpy.run_path(str(path), run_name="__main__")
        return
    code = compile(path.read_bytes(), str(path), "exec")
    module = ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    sys.argv[:] = words
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _prepare(keep_torch: bool) -> None:
    dropin.export_environment()
    if not keep_torch:
        dropin.install()
