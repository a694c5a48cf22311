"""A and A′ are used again where nothing that decides them has changed; what a rehearsal costs is said before."""

import zipfile
from pathlib import Path

import pytest

from chronicle.errors import ChronicleError, UsageProblem
from chronicle.rehearse import kept
from chronicle.rehearse.launches import Place
from chronicle.rehearse.script import lines_with, refuse_outside

COMMAND = ("python", "train.py", "--data", "rows", "{out}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import torch\nema = 1\nstate = torch.load('x')\n")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "1.txt").write_text("one")
    return tmp_path


def test_the_identity_follows_command_steps_code_data_and_environment_and_nothing_else(place: Path) -> None:
    def identity(command: tuple[str, ...] = COMMAND, to: int = 20, **environ: str) -> str | None:
        return kept.identity_of(command, (10, to), place, environ)

    first = identity()
    assert first == identity() == identity(SLURM_JOB_ID="7"), "the clock and the job do not count"
    assert len({first, identity((*COMMAND, "--fast")), identity(to=30), identity(LR="3")}) == 4
    (place / "rows" / "1.txt").write_text("other")
    with_data = identity()
    (place / "helper.py").write_text("x = 1\n")
    assert len({first, with_data, identity()}) == 3
    (place / "train.py").write_text("import torch\n")
    assert identity() not in (first, with_data)


def test_what_is_needed_is_said_before_and_a_full_disk_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = kept.said_before(place, 20, 61.0)
    assert said.startswith("rehearsal: 4 launches, about 60 steps, 61 s the last time; below ")
    kept.mark_played(place, 1)
    said = kept.said_before(place, 20, None)
    assert "2 launches (A and A′ are those of an earlier rehearsal)" in said and said.endswith("`")
    assert kept.said_before(place, 20, None, is_one=True).startswith("rehearsal: 1 launch, about 20 steps")
    odd = kept.said_before(place.with_name("Ignite, MNIST"), 20, None)  # Hydra reads such a path as a list of values
    assert odd.endswith("`, which options may read as several: --keep DIR names another")
    monkeypatch.setattr(kept, "bytes_below", lambda folder: 1 << 60)
    with pytest.raises(ChronicleError, match="left for A′ and B"):
        kept.ensure_room(place)


def test_only_whole_and_known_pairs_of_reasonable_size_are_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        (place / "kept" / name / "b").mkdir(parents=True)
    kept.mark_played(place / "kept" / "new", 1)
    kept.tidy(place / "kept" / "new", is_known=True)
    assert [path.name for path in (place / "kept").iterdir()] == ["new"] and not (place / "kept" / "new" / "b").exists()
    monkeypatch.setattr(kept, "bytes_below", lambda folder: kept.MOST_KEPT_BYTES + 1)
    kept.tidy(place / "kept" / "new", is_known=True)
    assert not list((place / "kept").iterdir())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--out", "{there}/new"), "does not exist yet"), (("--out={there}/empty",), "is empty"),
        (("{there}/saves",), "holds checkpoints"),
    ],
)  # fmt: skip
def test_a_command_that_writes_outside_is_refused_with_the_place_for_out(
    tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there / "empty", there / "saves" / "global_step10", there / "rows"):
        folder.mkdir(parents=True)
    (there / "saves" / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (there / "rows" / "1.txt").write_text("data")
    refuse_outside(("python", "train.py", "--data", f"{there}/rows", "--rate=1/2"), here)
    with pytest.raises(UsageProblem, match=why) as found:
        refuse_outside(tuple(word.format(there=there) for word in words), here)
    assert "{out}" in str(found.value.remedy)


def test_the_lines_that_save_and_load_a_key_are_named_and_nothing_is_said_where_none_is_found(place: Path) -> None:
    script = "queue = 0  # 'queue'\nstate = {'queue': queue}\nstate = torch.load('x')\nqueue = state[\"queue\"]\n"
    (place / "train.py").write_text(script)
    assert lines_with(COMMAND, place, "queue") == "train.py:2, 4: `queue`"
    assert lines_with(COMMAND, place, "ema") == lines_with(("python", "-m", "trl"), place, "queue") == ""


def test_a_copy_has_no_checkpoint_and_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source file with one number in its name is no save of that step."""
    here = tmp_path / "here"
    (here / "T6_examples").mkdir(parents=True)
    (here / "data").mkdir()  # as the place is called that was named with --keep
    (here / "T5_training.py").write_text("print(1)\n")
    with zipfile.ZipFile(here / "rl_model_400_steps.zip", "w") as packed:
        packed.writestr("policy.pth", b"weights")
    monkeypatch.chdir(here)
    place = Place(name="a", scratch=tmp_path / "data", is_copy=True)
    place.prepare()
    assert sorted(path.name for path in place.out.iterdir()) == ["T5_training.py", "T6_examples", "data"]
