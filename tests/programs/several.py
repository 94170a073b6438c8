"""Programs one after the other in one job, which spares the start of the ranks.

Each argument is a program's path, and its own arguments if it has some. Every rank tells each program's exit
status.
"""

import runpy
import shlex
import sys


def run(command):
    sys.argv = shlex.split(command)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        return error.code or 0
    return 0


for command in sys.argv[1:]:
    print(f"{command.split()[0]} ended with {run(command)}", flush=True)
