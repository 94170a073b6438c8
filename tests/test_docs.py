"""Code in the documentation runs.

A block that opens with ```` ```python run ```` in README.md or docs/ is a whole program: it runs on 2 ranks,
or on n with ```` ```python run=n ````, and must end with status 0. Tests that a page names exist.
"""

import ast
import re

import pytest

from tests._ranks.launch import ROOT, run_ranks

BLOCK = re.compile(r"^```python run(?:=(?P<size>\d+))?[ \t]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)[^)]*\)")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks():
    """Every block that is marked to run, with its page and line in the test's name."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            name = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
            yield pytest.param(int(match["size"] or 2), match["code"], id=name)


@pytest.mark.parametrize(("size", "code"), list(blocks()))
def test_block_runs(size, code, tmp_path):
    program = tmp_path / "block.py"
    program.write_text(code, encoding="utf-8")
    finished = run_ranks(size, [str(program)], timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert finished.rc == 0, finished.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


NAMED_TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page):
    named = {
        (match["file"], match["name"]) for match in NAMED_TEST.finditer(page.read_text(encoding="utf-8"))
    }
    assert [f"{file}::{name}" for file, name in sorted(named) if name not in definitions(file)] == []


def definitions(file):
    """Names of the functions and classes at the top of a file; none if there is no such file."""
    path = ROOT / file
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_field_case_has_a_test_or_a_reason():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "field-cases.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| [")
    ]
    assert rows
    assert [
        row for row in rows if not (NAMED_TEST.fullmatch(row[3]) or row[3].startswith("not applicable: "))
    ] == []
