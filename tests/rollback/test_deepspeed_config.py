"""DeepSpeed's own schedulers: the LRs are in the config of the next launch, which changes together with the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chronicle.cli.main import run
from chronicle.journal import JournalWriter
from chronicle.paths import RunPaths
from rollback.errors import PlanRefused
from rollback.files.config_text import ConfigFile, NotPlainJson, parse_object, replace_config_numbers
from rollback.lr.deepspeed import config_notes, plan_config
from tests.builders.checkpoints import run_script
from tests.rollback.disks import picture

KINDS = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
RECORDED = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def config_file(config: Any) -> ConfigFile:
    return ConfigFile("/conf/ds.json", config if isinstance(config, str) else json.dumps(config), "from --deepspeed-config")


def edits(config: Any, recorded: Any = RECORDED, scale: float = 0.5) -> dict[str, tuple[float, float]]:
    return {edit.field: (edit.before, edit.after) for edit in plan_config(config_file(config), recorded, scale).edits}


# --- the text


def test_only_the_numbers_change_in_the_text() -> None:
    text = '{\n   "a": [1, {"b": 2.5e-3 , "c": "x, \\"}]"}],\t"lr":0.001,\n "d": null\n}\n'
    after = replace_config_numbers(text, "json", {("a", 1, "b"): 0.5, ("lr",): 5e-4, ("a", 0): 7})
    assert after == '{\n   "a": [7, {"b": 0.5 , "c": "x, \\"}]"}],\t"lr":0.0005,\n "d": null\n}\n'
    assert replace_config_numbers(text, "json", {}) == text


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "in line 1"),
        ('{"a": 1} // mine', "Extra data"),
        ('{"a": {"lr": 1, "lr": 2}}', "'lr' appears twice"),
        ("[1]", "not an object"),
        ("[" * 200_000, "nested too deeply"),
        (" " * (1 << 21), "larger than"),
    ],
)
def test_text_that_is_no_plain_json_object_is_named(text: str, words: str) -> None:
    with pytest.raises(NotPlainJson, match=words):
        parse_object(text)


# --- the plan


def test_fields_that_decide_are_scaled_from_what_the_checkpoint_was_made_with() -> None:
    assert edits(RECORDED) == {"scheduler.params.warmup_max_lr": (1e-3, 5e-4)}
    # an earlier rollback has halved the file: the new scale counts from this checkpoint, not from that
    again = json.loads(json.dumps(RECORDED))
    again["scheduler"]["params"]["warmup_max_lr"] = 5e-4
    assert edits(again) == {}
    assert edits(again, scale=0.25) == {"scheduler.params.warmup_max_lr": (5e-4, 2.5e-4)}


def test_lrs_per_group_are_scaled_one_by_one() -> None:
    own = {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": [1e-4, 2e-4], "cycle_max_lr": 1e-3}}}
    assert edits(own, own) == {
        "scheduler.params.cycle_min_lr.0": (1e-4, 5e-5),
        "scheduler.params.cycle_min_lr.1": (2e-4, 1e-4),
        "scheduler.params.cycle_max_lr": (1e-3, 5e-4),
    }


def test_warmup_without_a_peak_takes_the_lr_of_the_optimizer() -> None:
    own = {**RECORDED, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    assert edits(own, own) == {"optimizer.params.lr": (1e-3, 5e-4)}


def _changed(**params: Any) -> dict[str, Any]:
    return {**RECORDED, "scheduler": {"type": "WarmupLR", "params": params}}


@pytest.mark.parametrize(
    "config, recorded, message, remedy",
    [
        (_changed(), RECORDED, "does not contain `scheduler.params.warmup_max_lr`", "write .* with 0.0005"),
        (_changed(warmup_max_lr="1e-3"), RECORDED, "expected a number", None),
        ({"optimizer": {}}, RECORDED, "None, but the checkpoint was made with WarmupLR", "--deepspeed-config"),
        ('{"scheduler": 1, // mine\n}', RECORDED, "not plain JSON", "without comments"),
        (RECORDED, {}, "the checkpoint records no scheduler", "by hand"),
        (
            {"scheduler": {"type": "WarmupCosineLR", "params": {}}},
            {"scheduler": {"type": "WarmupCosineLR", "params": {}}},
            "the training script creates the optimizer",
            r"multiply the optimizer's LR in the training script by 0\.5",
        ),
    ],
)
def test_what_cannot_be_edited_is_refused_with_field_file_and_way_out(
    config: Any, recorded: Any, message: str, remedy: str | None
) -> None:
    import re

    with pytest.raises(PlanRefused, match=message) as caught:
        plan_config(config_file(config), recorded, 0.5)
    assert remedy is None or re.search(remedy, caught.value.remedy or "")


def test_unknown_file_is_refused_with_every_field_and_value() -> None:
    with pytest.raises(PlanRefused, match=r"`scheduler.params.warmup_max_lr` 0\.001 → 0\.0005") as caught:
        plan_config(None, RECORDED, 0.5)
    assert "--deepspeed-config FILE" in (caught.value.remedy or "")


def test_other_differences_between_file_and_checkpoint_are_said() -> None:
    other = _changed(warmup_min_lr=0, warmup_max_lr=1e-3, warmup_num_steps=9)
    assert "`scheduler.params.warmup_num_steps` is 9" in plan_config(config_file(other), RECORDED, 0.5).notes[0]
    assert "is 9" in config_notes(config_file(other), RECORDED)[0]
    assert config_notes(config_file("{"), RECORDED) == () == config_notes(None, RECORDED)


# --- the command, with what DeepSpeed then does


def _command(top: Path, *words: str) -> int:
    return run([*words, "--run", "r", "--logs", str(top / "logs"), "--checkpoints", str(top / "checkpoints")])


def _resume(out: Path) -> dict[str, list[list[float]]]:
    run_script("deepspeed_own_run.py", [str(out), json.dumps({"kinds": KINDS, "resume": True})])
    used = {kind: json.loads((out / kind / "used.json").read_text()) for kind in KINDS}
    for kind in KINDS:
        (out / kind / "used.json").unlink()
    return used


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_resume_uses_half_the_lr_with_every_scheduler_and_undo_gives_back_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("deepspeed_own_run.py", [str(tmp_path), json.dumps({"kinds": KINDS})])
    control = _resume(tmp_path)
    before = {kind: picture(tmp_path / kind / "checkpoints") for kind in KINDS}
    texts = {kind: (tmp_path / kind / "ds.json").read_bytes() for kind in KINDS}
    for kind in KINDS:
        top, words = tmp_path / kind, ("rollback", "--to", "10", "--lr-scale", "0.5", "--yes")
        assert len({row[0] for row in control[kind]}) > 1
        assert _command(top, *words) == 3  # nobody has said which file it is
        said = capsys.readouterr().err
        assert "config file of the next launch" in said and "--deepspeed-config" in said and "→" in said
        if kind == "WarmupLR":  # the command line of the newest launch names it
            argv = ["deepspeed", "train.py", "--deepspeed_config", "ds.json"]
            with JournalWriter(RunPaths(top / "logs" / "r")) as writer:
                writer.append("launch.start", launch=1, data={"argv": argv, "cwd": str(top)})
                writer.append("launch.end", launch=1, data={"exit_code": 0})
            assert _command(top, *words) == 0
        else:
            assert _command(top, *words, "--deepspeed-config", str(top / "ds.json")) == 0
        assert "ds.json  (config of the next launch)" in capsys.readouterr().out
        contract = json.loads((top / "logs" / "r" / "contract.json").read_text())
        assert contract["lr_ratio"] == 0.5
    halved = _resume(tmp_path)
    for kind in KINDS:
        assert halved[kind] == [[pytest.approx(lr / 2, rel=1e-9) for lr in row] for row in control[kind]], kind
        assert _command(tmp_path / kind, "undo", "--yes") == 0
        assert (tmp_path / kind / "ds.json").read_bytes() == texts[kind]
        assert picture(tmp_path / kind / "checkpoints") == before[kind]
