"""Scripts that keep their state where nobody told: one file that is overwritten, and weights that nobody seeded."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.replay.causes import digests
from chronicle.errors import Refusal
from chronicle.latest import pointers_to
from chronicle.prints.compared import compare_prints
from chronicle.prints.ring import SeenParts
from chronicle.replay.closed import landlock_version
from chronicle.replay.plan import Plan, Saved, is_wide
from chronicle.replay.replica import Replica
from chronicle.replay.verdict import ReplayCase, ReplayVerdict, judge_replay
from chronicle.settings import Settings
from rollback.checkpoint.listing import open_checkpoint
from tests.replay.test_replay import environ
from tests.replay.test_verdict import START, UNTIL, prints

ONE_FILE = """
import os, sys
import torch
import chronicle

if "seeded" in sys.argv:
    torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
chronicle.attach(None, model, optimizer)
step = 0
if os.path.exists("state.pt"):
    state = torch.load("state.pt", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    step = state["step"]
while step < 23:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "rng": torch.get_rng_state(), "step": step}, "state.pt")
torch.save(model.state_dict(), "final.pt")
"""
PLACE = ("--run", "small", "--logs", "logs")


def chronicle(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chronicle_ml", words[0], *PLACE, *words[1:]]
    return subprocess.run(command, cwd=directory, env=environ(), capture_output=True, text=True, timeout=300, check=False)


def record(directory: Path, *words: str, edits: Sequence[tuple[str, str]] = ()) -> None:
    text = ONE_FILE
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    (directory / "train.py").write_text(text)
    done = chronicle(directory, "run", "--", sys.executable, "train.py", *words)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_state_file_that_nobody_named_is_found_and_is_not_there_at_the_beginning(tmp_path: Path) -> None:
    record(tmp_path, "seeded")
    before = digests(tmp_path)
    found = [json.loads(chronicle(tmp_path, "replay", step, "--json").stdout) for step in ("23", "3")]
    assert [(one["verdict"], one["start"], one["compared"]) for one in found] == [("reproduced", 20, 3), ("reproduced", 0, 3)]
    after = digests(tmp_path)
    assert {path: after.get(path) for path in before} == before


@pytest.mark.slow
def test_weights_that_nobody_seeded_are_named_where_a_launch_begins(tmp_path: Path) -> None:
    record(tmp_path)
    found = json.loads(chronicle(tmp_path, "replay", "3", "--json").stdout)
    assert found["verdict"] == "not deterministic" and "other weights every time" in found["why"]


def test_no_checkpoint_is_blamed_where_there_was_none() -> None:
    other = prints()
    other[0] = {step: replace(one, weights=999) for step, one in other[0].items()}
    one = compare_prints(prints(), other, start=START, until=UNTIL, begins={0: other[0][START]})
    case = ReplayCase(ranks=one.ranks, has_checkpoint=False)
    assert judge_replay(case).again
    apart = judge_replay(replace(case, plays_agree=False))
    assert apart.verdict is ReplayVerdict.RANDOM and "not seeded" in apart.why
    same = judge_replay(replace(case, plays_agree=True))
    assert same.verdict is ReplayVerdict.STATE and "checkpoint" not in same.why
    named = judge_replay(replace(case, plays_agree=True, changed=[("file", "`base.pt`, which the launch read, has changed")]))
    assert named.verdict is ReplayVerdict.CODE and "base.pt" in named.why


def test_generators_that_are_told_late_and_that_nobody_restores_are_no_difference() -> None:
    """A model that is called within the step leaves none in its first print. Unseeded, NumPy's is another one everywhere."""
    late, other = prints(), prints()
    late[0][START + 1] = replace(late[0][START + 1], seen=late[0][START + 1].seen & ~SeenParts.GENERATORS)
    other[0] = {step: replace(one, numpy=7) for step, one in other[0].items()}
    begins = {0: other[0][START]}
    one = compare_prints(late, other, start=START, until=UNTIL, begins=begins)
    assert one.first is None and one.unrestored == ("numpy",)
    other[0][UNTIL] = replace(other[0][UNTIL], gradient=999)
    found = compare_prints(late, other, start=START, until=UNTIL, begins=begins).first
    assert found is not None and (found.step, found.parts) == (UNTIL, ("gradient",))


def test_generators_that_are_told_behind_the_first_difference_are_not_what_came_first() -> None:
    """Within its first step the model is called by the optimizer: where the generators stood is told from the next step on."""
    late, other = prints(), prints()
    first = START + 1
    late[0][first] = replace(late[0][first], seen=late[0][first].seen & ~SeenParts.GENERATORS, loss=9.0, gradient=9)
    other[0] = {step: replace(one, torch=7) for step, one in other[0].items()}
    found = compare_prints(late, other, start=START, until=UNTIL, begins={0: other[0][START]})
    assert found.first is not None and found.first.step == first and "torch" not in found.unrestored


def test_of_a_root_that_holds_the_working_directory_only_checkpoints_are_the_runs_own(tmp_path: Path) -> None:
    assert is_wide(tmp_path, tmp_path / "project") and not is_wide(tmp_path / "ck", tmp_path)
    state, data = tmp_path / "state.pt", tmp_path / "data.pt"
    saved_at(tmp_path, (4,), name="state.pt")
    data.write_bytes(b"rows")
    place = replica(tmp_path, root=tmp_path, saves=(state,), begin=state)
    assert place.plan.own == (tmp_path / "logs" / "small", state)
    assert (place.cwd / "data.pt").read_bytes() == b"rows" and (place.cwd / "state.pt").exists()
    assert not (replica(tmp_path, root=tmp_path, saves=(state,), begin=None).cwd / "state.pt").exists()


def test_the_newest_under_a_second_name_is_the_one_to_begin_with(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    root.mkdir()
    for name, step in (("epoch=0-step=4", 4), ("epoch=0-step=8", 8), ("last", 8)):
        rest = {"optimizer_states": [], "lr_schedulers": [], "loops": {}, "pytorch-lightning_version": "2.6.0"}
        state = {"epoch": 0, "global_step": step, "state_dict": {"w": torch.zeros(1)}, **rest}
        torch.save(state, root / f"{name}.ckpt")
    saves, begin = tuple(sorted(root.glob("*.ckpt"))), root / "epoch=0-step=4.ckpt"
    place = replica(tmp_path, root=root, saves=saves, begin=begin)
    assert (place.out / "last.ckpt").read_bytes() == begin.read_bytes()
    assert sorted(os.listdir(place.out)) == [begin.name, "last.ckpt"]
    (root / "latest").write_text(saves[1].name)
    assert (replica(tmp_path, root=root, saves=saves, begin=begin).out / "latest").read_text() == begin.name
    assert os.listdir(replica(tmp_path, root=root, saves=saves, begin=None).out) == []


def test_a_play_is_told_of_its_own_places_and_of_no_others(tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    root.mkdir()
    saved_at(root, (4,))
    project = tmp_path / "project"
    (project / ".venv").mkdir(parents=True)
    (project / "train.py").write_text("")
    place = replica(project, root=root, saves=(root / "step-4.pt",), begin=root / "step-4.pt")
    tree = place.tree
    assert place.told(f"--out={root}/new") == f"--out={tree}{root}/new"
    assert place.told(f"{project}/train.py") == f"{tree}{project}/train.py"
    for word in (f"{project}/.venv", f"{project}-two", "/usr/lib", f"prefix{root}"):
        assert place.told(word) == word
    assert place.untold(place.told(f"{root}/step-4.pt")) == f"{root}/step-4.pt"
    (tmp_path / "data").mkdir()
    beside = replica(project, root=root, saves=(root / "step-4.pt",), begin=None)
    assert (beside.cwd / "../data").resolve() == tmp_path / "data" and not (beside.cwd / "../elsewhere").is_symlink()
    assert str(tmp_path) not in place.writable()


def test_a_script_that_names_the_runs_place_in_its_text_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    root.mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(f"ROOT = '{root}'")
    with pytest.raises(Refusal, match=r"train.py` names .*elsewhere"):
        replica(tmp_path / "project", root=root, saves=(), begin=None)


def test_large_files_are_links_and_a_play_cannot_write_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronicle.replay.replica.LINKED_BYTES", 100)
    monkeypatch.setattr("chronicle.replay.replica.landlock_version", lambda: 1)
    (tmp_path / "table.bin").write_bytes(bytes(200))
    (tmp_path / "small.bin").write_bytes(bytes(20))
    place = replica(tmp_path, root=tmp_path / "ck", saves=(), begin=None)
    assert (place.cwd / "table.bin").readlink() == tmp_path / "table.bin" and not (place.cwd / "small.bin").is_symlink()
    if landlock_version():
        spec = json.dumps({"network": True, "writable": [str(place.scratch)], "parent": os.getpid()})
        script = "echo x > small.bin; echo x > table.bin"
        words = [sys.executable, "-m", "chronicle.replay.closed", spec, "sh", "-c", script]
        done = subprocess.run(words, cwd=place.cwd, env=environ(), capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "table.bin" in done.stderr and "small.bin" not in done.stderr
        words[3] = json.dumps({"network": True, "writable": [], "parent": 1 if os.getpid() != 1 else 2})
        late = subprocess.run(words, cwd=place.cwd, env=environ(), capture_output=True, text=True, check=False)
        assert late.returncode == 1 and "was ended before its launch began" in late.stderr
    assert (tmp_path / "table.bin").read_bytes() == bytes(200)


def replica(cwd: Path, *, root: Path, saves: tuple[Path, ...], begin: Path | None) -> Replica:
    """A prepared one of a run in `cwd`, as its journal would name it."""
    run_dir = cwd / "logs" / "small"
    run_dir.mkdir(parents=True, exist_ok=True)
    saved = None if begin is None else Saved(step=4, checkpoint=open_checkpoint(begin), identity={})
    plan = Plan(
        settings=Settings(run="small", logs_dir=cwd / "logs", checkpoints_dir=root), launch=1, begin=saved,
        command=("python", "train.py"), cwd=cwd, environ={}, roots=(root,), saves=saves,
    )  # fmt: skip
    place = Replica(name="small", scratch=Path(tempfile.mkdtemp(dir=cwd.parent)), plan=plan)
    place.prepare()
    return place


@pytest.mark.slow
def test_a_command_that_names_its_checkpoint_gets_a_verdict(tmp_path: Path) -> None:
    text = ONE_FILE.replace('os.path.exists("state.pt")', '"resume" in sys.argv').replace("state[\"rng\"]", "torch.zeros(1)")
    (tmp_path / "again.py").write_text(text.replace("torch.set_rng_state(torch.zeros(1))", "torch.manual_seed(5)"))
    record(tmp_path)
    done = chronicle(tmp_path, "replay", "22", "--json", "--", sys.executable, "again.py", "resume")
    found = json.loads(done.stdout)
    assert (found["verdict"], found["start"]) == ("state differs", 20), found


def saved_at(root: Path, steps: Sequence[int], name: str = "step-{}.pt") -> None:
    """States of these steps."""
    for step in steps:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.AdamW([parameter])
        for _ in range(step):
            parameter.grad = torch.zeros(1)
            optimizer.step()
        torch.save({"model": {"w": parameter.data}, "optimizer": optimizer.state_dict()}, root / name.format(step))


def test_a_pointer_with_the_number_of_a_name_gets_that_of_the_other_name(tmp_path: Path) -> None:
    """`batch-8` is of step 4."""
    saved_at(tmp_path, (4,))
    (tmp_path / "latest").write_text("16")
    newest = replace(open_checkpoint(tmp_path / "step-4.pt"), path=tmp_path / "batch-8")
    assert [one.after for one in pointers_to(tmp_path, {"batch-16"}, newest)] == ["8"]
    (tmp_path / "latest").write_text("0016")
    newest = replace(newest, path=tmp_path / "0008")
    assert [one.after for one in pointers_to(tmp_path, {"0016"}, newest)] == ["0008"]
