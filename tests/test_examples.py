"""Every example runs under mpirun and ends with the line that it promises at its top."""

import re

import pytest

from tests._ranks.launch import ROOT, run_ranks

THIS_CHECKOUT = {"PYTHONPATH": str(ROOT)}
"""A script's own folder comes first on the path, not the folder that the ranks start in."""

EXAMPLES = [
    ("batch_rpc.py", 2),
    ("batch_rpc.py", 4),
    ("checkpoint_resume.py", 2),
    ("checkpoint_resume.py", 4),
    ("ddp_rpc.py", 2),
    ("ddp_rpc.py", 4),
    ("dist_autograd_simple.py", 2),
    ("dist_autograd_simple.py", 4),
    ("parameter_server.py", 2),
    ("parameter_server.py", 4),
    ("pipeline.py", 3),
    ("pipeline.py", 4),
    ("reinforce.py", 2),
    ("reinforce.py", 4),
    ("rnn.py", 2),
    ("rnn.py", 3),
]


def promised_line(name):
    """The last line of output, as the text at the example's top gives it."""
    (line,) = re.findall(r"``(OK: [^`]*)``", (ROOT / "examples" / name).read_text(encoding="utf-8"))
    return line


def test_every_example_is_run():
    run = {name for name, _ in EXAMPLES} | {"latency.py"}
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == run


@pytest.mark.parametrize(("name", "ranks"), EXAMPLES)
def test_example(name, ranks):
    finished = run_ranks(ranks, [f"examples/{name}"], timeout=120, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    assert finished.output.splitlines()[-1] == promised_line(name)


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
    assert latency[0] == started_by("latency.py")[1]
    assert named == {
        f"[{name}]({name})": (started_by(name)[1], promised_line(name))
        for name in {name for name, _ in EXAMPLES}
    }


@pytest.mark.parametrize(
    "name", ["batch_rpc.py", "ddp_rpc.py", "parameter_server.py", "pipeline.py", "reinforce.py", "rnn.py"]
)
def test_too_few_ranks_are_told_how_to_start_it(name):
    finished = run_ranks(1, [f"examples/{name}"], timeout=60, env=THIS_CHECKOUT)
    assert finished.rc == 2
    assert started_by(name)[0] in finished.output


def test_run_starts_an_example_too():
    argv = ["-m", "mpirpc", "run", "examples/pipeline.py"]
    finished = run_ranks(3, argv, timeout=120, env=THIS_CHECKOUT)
    assert finished.rc == 0, finished.output
    assert finished.output.splitlines()[-1] == promised_line("pipeline.py")


def test_checkpoint_is_resumed_by_a_job_with_other_ranks(tmp_path):
    """The losses of two jobs, one after the other, are those of one job that does not stop."""

    def losses(ranks, *options):
        argv = ["examples/checkpoint_resume.py", "--checkpoint", str(tmp_path / "run.pt"), *options]
        finished = run_ranks(ranks, argv, timeout=120, env=THIS_CHECKOUT)
        assert finished.rc == 0, finished.output
        return re.findall(r"step \d+: loss .*", finished.output)

    whole = losses(2)
    assert [line.split(":")[0] for line in whole] == ["step 5", "step 10", "step 15", "step 20"]
    assert losses(3, "--stop-at", "10") + losses(2, "--resume") == whole
