"""The documents are true: commands as the help texts say, exit codes as the program knows them, the tutorial as it runs."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import chronicle
import rollback
from chronicle.journal import compute_lineage, read_journal
from chronicle.paths import RunPaths
from scripts.commands import render_exit_codes, render_reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("*/*.md"))]


def test_the_reference_of_commands_is_what_the_help_texts_say() -> None:
    """Make it again with `python scripts/commands.py > docs/commands.md`."""
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == render_reference()


def test_every_exit_code_is_documented_in_the_same_words() -> None:
    assert render_exit_codes() in (DOCS / "exit_codes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(page: Path) -> None:
    """Links to files of the repository; addresses on the net are not followed."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    """Paths in backticks that begin with one of our folders."""
    folders = "rollback|chronicle|bit_transformer|experiments|tests|scripts|docs|benchmarks|examples"
    for target in re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / target).exists(), target


def test_every_page_of_the_site_is_in_its_table_of_contents() -> None:
    """`make docs` refuses it otherwise; Sphinx is not needed to see it."""
    listed = {DOCS / "index.md"}
    for page in PAGES:
        for toc in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            listed |= {page.parent / f"{line}.md" for line in toc.splitlines() if line and not line.startswith(":")}
    assert listed == {page for page in PAGES if page.is_relative_to(DOCS)}


def test_the_reference_names_what_is_there_and_documented() -> None:
    """Each `auto…` line of docs/api is an object of the package with a docstring, and the facade is complete."""
    named = set()
    for page in (DOCS / "api").glob("*.md"):
        named |= set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    for name in named:
        module, _, last = name.rpartition(".")
        assert getattr(import_module(module), last).__doc__, name
    methods = {"alert", "config", "log", "note"}  # of `Recording`
    facade = {*chronicle.__all__, "open"} - {"__version__", *methods}
    assert facade <= {name.rpartition(".")[2] for name in named}
    assert set(rollback.__all__) <= {name.rpartition(".")[2] for name in named}


def test_the_readme_is_read_in_two_minutes() -> None:
    """80 to 120 lines; the tree has a page of its own."""
    assert 80 <= (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120


@pytest.mark.slow
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Every block of `sh`, in order, in an empty directory, with nothing but the trainer that it prints."""
    pytest.importorskip("accelerate")
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    (trainer,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(trainer, encoding="utf-8")
    keep = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    root = str(Path(__file__).parents[2])
    environ = keep | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        done = subprocess.run(
            ["bash", "-euc", block], cwd=tmp_path, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, block + done.stdout + done.stderr
    paths = RunPaths(tmp_path / "logs" / "first")
    lineage = compute_lineage(read_journal(paths).entries)
    assert [(i.launch, i.first, i.last) for i in lineage.kept] == [(1, 1, 40), (2, 41, 100)]
    assert paths.chronicle_md.exists() and paths.report_html.exists()
