"""examples/checkpoint_resume.py, but its first run waits before step 8 until a signal stops it."""

import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import checkpoint_resume

import mpirpc

step = checkpoint_resume.Training.step


def wait_before_step_8(training):
    if len(training.losses) == 7 and "SLURM_RESTART_COUNT" not in os.environ:
        print("waiting for a signal", flush=True)
        threading.Event().wait()
    step(training)


checkpoint_resume.Training.step = wait_before_step_8
mpirpc.run_main(checkpoint_resume.main)
