"""What machines tell each other is no part of a person's story, unless it went wrong."""

from pathlib import Path

import pytest

from tests.builders.story_runs import toy_run
from tests.commands.cli import Cli
from tests.commands.conftest import chronicle

__all__ = ["chronicle"]


@pytest.mark.parametrize(("verdict", "told"), [("passed", False), ("failed", True)])
def test_a_preflight_is_told_only_when_it_failed(verdict: str, told: bool, tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.add("preflight", launch=2, title="preflight: 3 checks", data={"verdict": verdict, "checks": []})
    run.add("guard.batches", launch=2, title="batches seen")
    chronicle("render", "--no-plots")
    for page in (chronicle("log", "--graph").out, run.paths.chronicle_md.read_text()):
        assert ("preflight: 3 checks" in page) is told
        assert "batches seen" not in page
    assert "batches seen" in chronicle("log", "--all").out
