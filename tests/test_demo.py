"""The main job, ``mpirun -n 4 python -m mpirpc demo``, as a user would run it."""

import re

import pytest

from mpirpc.__main__ import make_parser
from tests._ranks.launch import run_ranks

DEMO = ["-m", "mpirpc", "demo"]


def run_demo(ranks, *options):
    return run_ranks(ranks, [*DEMO, *options], timeout=120)


def number_in(pattern, output):
    (number,) = re.findall(pattern, output)
    return float(number)


def test_demo_learns_and_equals_one_process():
    finished = run_demo(4, "--check")
    assert finished.rc == 0, finished.output
    assert number_in(r"test accuracy: ([\d.]+) %", finished.output) >= 95
    assert number_in(r"largest loss difference: (\S+)", finished.output) <= 1e-5
    assert len(re.findall(r"^epoch +\d+/20  loss \d", finished.output, re.MULTILINE)) == 20
    assert number_in(r"(\d+) RPCs made", finished.output) > 1000
    assert number_in(r"RPCs made, ([\d.]+) MB moved, [\d.]+ s", finished.output) > 1


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_roles_fold_and_losses_stay_the_same(ranks):
    finished = run_demo(ranks, "--check", "--epochs", "1", "--batch-size", "200", "--seed", "7")
    assert finished.rc == 0, finished.output
    assert number_in(r"largest loss difference: (\S+)", finished.output) <= 1e-5


def test_one_rank_is_told_how_to_start():
    finished = run_demo(1)
    assert finished.rc == 2
    assert "mpirun -n 4 python -m mpirpc demo" in finished.output
    assert "Traceback" not in finished.output


def test_missing_scikit_learn_gets_a_sentence(tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError('hidden by the test')\n")
    finished = run_ranks(2, DEMO, timeout=60, env={"PYTHONPATH": str(tmp_path)})
    assert finished.rc == 1
    assert "pip install mpirpc[demo]" in finished.output
    assert "Traceback" not in finished.output


@pytest.mark.parametrize(
    "options", [["--epochs", "0"], ["--batch-size", "-1"], ["--lr", "nan"], ["--epochs", "x"]]
)
def test_unfit_options_are_refused_before_mpi_starts(options, capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["demo", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["--help"])
    assert caught.value.code == 0
    assert "demo" in capsys.readouterr().out
