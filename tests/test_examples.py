"""Every example runs under mpirun and ends with the line that it promises at its top.

Each has a job of its own for the command at its top; other numbers of ranks share jobs.
"""

import re

import pytest

from tests._ranks.launch import ROOT, run_ranks

THIS_CHECKOUT = {"PYTHONPATH": str(ROOT)}
"""A script's own folder comes first on the path, not the folder that the ranks start in."""

EXAMPLES = [
    "batch_rpc.py",
    "checkpoint_resume.py",
    "ddp_rpc.py",
    "dist_autograd_simple.py",
    "parameter_server.py",
    "pipeline.py",
    "reinforce.py",
    "rnn.py",
]

OTHER_NUMBERS = [
    (
        2,
        {
            "batch_rpc.py",
            "checkpoint_resume.py",
            "ddp_rpc.py",
            "parameter_server.py",
            "reinforce.py",
            "rnn.py",
        },
    ),
    (4, {"batch_rpc.py", "checkpoint_resume.py", "dist_autograd_simple.py", "parameter_server.py"}),
]
"""Below, pipeline.py runs on 3."""

ONE_IS_ENOUGH = "dist_autograd_simple.py"


def promised_line(name):
    """The last line of output, as the text at the example's top gives it."""
    (line,) = re.findall(r"``(OK: [^`]*)``", (ROOT / "examples" / name).read_text(encoding="utf-8"))
    return line


def test_every_example_is_run():
    run = {*EXAMPLES, "latency.py", "survive.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == run


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    ranks = int(started_by(name)[1])
    finished = run_ranks(ranks, [f"examples/{name}"], timeout=120, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    assert finished.output.splitlines()[-1] == promised_line(name)


@pytest.mark.parametrize(("ranks", "names"), OTHER_NUMBERS, ids=["2", "4"])
def test_examples_on_other_numbers_of_ranks(ranks, names):
    paths = [f"examples/{name}" for name in sorted(names)]
    finished = run_ranks(ranks, ["tests/programs/several.py", *paths], timeout=240, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    for name in names:
        assert promised_line(name) in finished.output.splitlines(), finished.output
        assert finished.output.count(f"examples/{name} ended with 0") == ranks, finished.output


def test_latency_ends_with_its_figures():
    finished = run_ranks(2, ["examples/latency.py", "--calls", "20"], timeout=120, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    form = r"no-op rpc_sync, median: mpirpc [\d.]+ us, torch [\d.]+ us, ratio [\d.]+"
    assert re.fullmatch(form, finished.output.splitlines()[-1]), finished.output


def started_by(name):
    """The command that starts an example, as the text at its top gives it first, and its number of ranks."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    found = re.search(rf"^    (mpirun -n (\d) python examples/{name})", text, re.MULTILINE)
    return found[1], found[2]


def test_table_names_every_example_with_its_ranks_and_last_line():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "examples" / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| [")
    ]
    named = {name: (ranks.split()[0], last.strip("`")) for name, _, ranks, last in rows}
    latency = named.pop("[latency.py](latency.py)")
    assert named.pop("[survive.py](survive.py)")[1] == promised_line("survive.py")  # see test_failures.py
    assert latency[0] == started_by("latency.py")[1]
    assert named == {f"[{name}]({name})": (started_by(name)[1], promised_line(name)) for name in EXAMPLES}


def test_too_few_ranks_are_told_how_to_start_it():
    paths = [f"examples/{name}" for name in EXAMPLES]
    finished = run_ranks(1, ["tests/programs/several.py", *paths], timeout=120, env=THIS_CHECKOUT)
    assert f"examples/{ONE_IS_ENOUGH} ended with 0" in finished.output, finished.output
    for name in set(EXAMPLES) - {ONE_IS_ENOUGH}:
        assert f"examples/{name} ended with 2" in finished.output, finished.output
        assert started_by(name)[0] in finished.output


def test_run_starts_an_example_too():
    argv = ["-m", "mpirpc", "run", "examples/pipeline.py"]
    finished = run_ranks(3, argv, timeout=120, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    assert finished.output.splitlines()[-1] == promised_line("pipeline.py")


def test_checkpoint_is_resumed_by_a_job_with_other_ranks(tmp_path):
    """The losses of two jobs, one after the other, are those of one job that does not stop."""

    checkpoint = f"examples/checkpoint_resume.py --checkpoint {tmp_path}/"

    def losses(ranks, *runs):
        """Run it on these ranks, once for each text of options."""
        argv = ["tests/programs/several.py", *(checkpoint + options for options in runs)]
        finished = run_ranks(ranks, argv, timeout=120, env=THIS_CHECKOUT)
        assert finished.rc == 0, finished.output
        return re.findall(r"step \d+: loss .*", finished.output)

    begun = losses(3, "run.pt --stop-at 10")
    both = losses(2, "run.pt --resume", "whole.pt")
    resumed, whole = both[:-4], both[-4:]
    assert [line.split(":")[0] for line in whole] == ["step 5", "step 10", "step 15", "step 20"]
    assert begun + resumed == whole
