"""Halving finds the planted change in few trials, and real forks of a recorded launch are judged as they should be."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replay.causes import HELPERS, OBJECTIVE, TRAIN, digests
from chronicle.journal import read_journal
from chronicle.paths import RunPaths
from chronicle.replay.bisect import Axis, Bisect, BisectTrial, Candidate, TrialOutcome, _among, halve, sentence
from tests.replay.test_replay import PROBE, chronicle, environ

UNPROVED = ("--accept-unproved", "the script makes the optimizer, and loads its state afterwards")
GIT = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.c", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b.c"}


def test_halving_finds_every_planted_change_within_log2_and_two_trials() -> None:
    for num in (2, 3, 8, 9, 40):
        for first_bad in range(1, num):
            answer = halve(num, lambda place, bad=first_bad: trial(place, place >= bad))
            assert (answer.good, answer.bad, answer.left) == (first_bad - 1, first_bad, ())
            assert len(answer.trials) <= math.ceil(math.log2(num)) + 2
            assert len({one.name for one in answer.trials}) == len(answer.trials), "a candidate was tried twice"


def test_halving_walks_around_what_cannot_be_told() -> None:
    draw = random.Random(3)
    for _ in range(200):
        num = draw.randrange(3, 30)
        first_bad = draw.randrange(1, num)
        untold = {place for place in range(1, num - 1) if draw.random() < 0.3}
        answer = halve(num, lambda place, bad=first_bad, no=untold: trial(place, place >= bad, place in no))
        assert answer.good is not None and answer.bad is not None
        assert answer.good < first_bad <= answer.bad
        assert set(range(answer.good + 1, answer.bad)) == set(answer.left) <= untold


def test_ends_that_are_not_as_said_end_the_search() -> None:
    assert halve(8, lambda place: trial(place, False)).bad is None
    answer = halve(8, lambda place: trial(place, True))
    assert (answer.good, answer.bad, len(answer.trials)) == (None, 7, 2)


def test_an_end_that_could_not_be_judged_is_no_answer() -> None:
    """The launcher ended at once with code 2: that is neither "it goes well" nor "it goes bad"."""
    for untold, words in ((7, "7"), (0, "0")):
        answer = halve(8, lambda place, no=untold: trial(place, True, place == no))
        assert (answer.good, answer.bad) == (None, None) and answer.untold is not None and answer.untold.name == words
    names = tuple(Candidate(name=name) for name in "abc")
    origin: Any = SimpleNamespace(command=("train", "{}"))
    asked = Bisect(origin=origin, axis=Axis.AMONG, candidates=names, until=9, bad_if="loss > 1")
    skipped = BisectTrial(name="a,b,c", outcome=TrialOutcome.SKIPPED, why="no loss was logged (code 2)")
    told = sentence(asked, _among(asked, lambda candidate: skipped))
    assert told == "nothing was found: the trial with a,b,c could not be judged: no loss was logged (code 2)"


def trial(place: int, bad: bool, untold: bool = False) -> BisectTrial:
    """What a judge says of a place."""
    outcome = TrialOutcome.SKIPPED if untold else TrialOutcome.BAD if bad else TrialOutcome.GOOD
    return BisectTrial(name=str(place), outcome=outcome, why="planted")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 24 steps, with checkpoints at 10 and 20, in a repository of nine commits; the sixth changed the arithmetic."""
    import torch

    directory = tmp_path_factory.mktemp("bisect").resolve()
    probe = [tmp_path_factory.mktemp("seen"), tmp_path_factory.mktemp("kept")]
    trial = [sys.executable, "-c", PROBE, *map(str, probe)]
    tried = subprocess.run(trial, env=environ(), capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no private mount namespace here: {tried.stderr.strip().splitlines()[-1]}")
    generator = torch.Generator().manual_seed(5)
    rows, labels = torch.randn(400, 8, generator=generator), torch.randint(0, 3, (400,), generator=generator)
    torch.save((rows, labels), directory / "data.pt")
    (directory / ".gitignore").write_text("logs\ncheckpoints\n*.pt\n__pycache__\n")
    git(directory, "init", "-q")
    for number in range(9):
        changed = HELPERS.replace("return 1.0", "return 1.01") if number >= 5 else HELPERS
        texts = {"train.py": TRAIN, "objective.py": OBJECTIVE, "helpers.py": changed + f"\n\nNUMBER = {number}\n"}
        for name, text in texts.items():
            (directory / name).write_text(text)
        if number == 3:
            (directory / "extra.py").write_text("import none_such\n")
        if number == 4:
            (directory / "extra.py").unlink()
        git(directory, "add", "-A")
        git(directory, "commit", "-q", "-m", f"change {number}")
        if number == 2:
            done = chronicle(directory, "run", "--", sys.executable, "train.py", "24")
            assert done.returncode == 0, done.stderr[-2000:]
    return directory


def git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *words], env={**os.environ, **GIT}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.sample
def test_the_commit_that_changed_the_arithmetic_is_found_and_nothing_else_changes(repository: Path) -> None:
    before = digests(repository)
    asked = ["bisect", "--commits", "HEAD~6..HEAD", "--until", "22", "--bad-if", "differs", "--json"]
    done = chronicle(repository, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["answer"].startswith(git(repository, "rev-parse", "HEAD~3")[:12]), found["answer"]
    assert "(change 5) is the first bad commit" in found["answer"]
    assert len(found["rows"]) <= 5
    after = digests(repository)
    assert {path: after.get(path) for path in before} == before
    assert all("/journal" in path or path.endswith("run.json") for path in after.keys() - before.keys())
    again = chronicle(repository, *asked)
    assert again.returncode == 0 and "tried before" in again.stderr
    trials = list(read_journal(RunPaths(repository / "logs" / "small")).of_kind("trial"))
    assert len(trials) == len(found["rows"]), "what was tried is not tried again"


@pytest.mark.slow
def test_the_recorded_code_is_replayed_when_asked(repository: Path) -> None:
    today = chronicle(repository, "replay", "22", "--json")
    assert today.returncode == 5 and json.loads(today.stdout)["verdict"] == "code, packages or settings differ"
    recorded = chronicle(repository, "replay", "22", "--recorded-code", "--json")
    assert recorded.returncode == 0, recorded.stdout + recorded.stderr
    assert json.loads(recorded.stdout)["verdict"] == "reproduced"


@pytest.mark.slow
def test_the_factor_of_the_lr_is_found_by_a_judge_of_the_user(repository: Path) -> None:
    judge = 'python3 -c "import os, sys; sys.exit(float(os.environ[\'CHRONICLE_TRIAL_VALUE\']) > 1.0)"'
    done = chronicle(repository, "bisect", "--lr-scale", "0.8..1.3", "--until", "22", "--judge", judge, *UNPROVED, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    low, high = (float(word) for word in json.loads(done.stdout)["answer"].split() if word[0].isdigit())
    assert low <= 1.0 < high and high / low < 1.11


@pytest.mark.slow
def test_where_both_ends_go_well_nothing_is_found(repository: Path) -> None:
    done = chronicle(repository, "bisect", "--steps", "10..20", "--until", "22", "--judge", "exit 0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("from the checkpoint of step 20 it goes well, too")


@pytest.mark.slow
def test_the_member_that_makes_it_bad_is_found(repository: Path) -> None:
    judge = 'case "$CHRONICLE_TRIAL_VALUE" in *n3*) exit 1;; esac'
    names = "n1,n2,n3,n4,n5"
    command = ["--", sys.executable, "train.py", "24", "{}"]
    done = chronicle(repository, "bisect", "--among", names, "--until", "22", "--judge", judge, "--json", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["answer"] == "n3 makes it bad, also alone" and len(found["rows"]) <= 5


@pytest.mark.slow
def test_what_is_asked_wrongly_is_said(repository: Path) -> None:
    for words, said in (
        (["--until", "22"], "0 axes are named"),
        (["--lr-scale", "2", "--until", "22"], "expected GOOD..BAD"),
        (["--lr-scale", "1..2"], "no incident is open"),
        (["--values", "a,b", "--until", "22"], "has no {}"),
        (["--commits", "none..HEAD", "--until", "22"], "git knows no commits"),
        (["--lr-scale", "1..2", "--until", "22", "--bad-if", "sad"], "--bad-if sad"),
    ):
        done = chronicle(repository, "bisect", *words)
        assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
