"""A script's own words: `chronicle.log`, `config`, `note`, `alert`. They never raise, and write nothing outside a launch."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from chronicle.credentials import looks_secret
from chronicle.journal import read_journal
from chronicle.metrics import read_metrics
from chronicle.paths import RunPaths
from chronicle.recording import Recording
from chronicle.story.launch_settings import HIDDEN, plain_settings

ROOT = Path(__file__).parents[2]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    run = tmp_path / "logs" / "tr"
    (run / "launches" / "0001").mkdir(parents=True, exist_ok=True)
    paths = {"CHRONICLE_RUN_DIR": str(run), "CHRONICLE_LAUNCH_DIR": str(run / "launches" / "0001")}
    return {"CHRONICLE_RUN": "tr", "CHRONICLE_LAUNCH": "1", **paths, **more}


def logged(tmp_path: Path) -> list[tuple[int, dict[str, float]]]:
    path = RunPaths(tmp_path / "logs" / "tr").metrics_path(1)
    return [(point.step, dict(point.values)) for point in read_metrics(path)] if path.exists() else []


def entries(tmp_path: Path, kind: str) -> list[Any]:
    return [entry for entry in read_journal(RunPaths(tmp_path / "logs" / "tr")).entries if entry.kind == kind]


def test_numbers_go_to_the_launch_and_words_to_the_journal(tmp_path: Path) -> None:
    run = Recording(environment(tmp_path))
    run.log(1, loss=2.5, lr=1e-3)
    run.log(2, {"train/loss": torch.tensor(2.25)}, grad_norm=math.inf)
    run.config({"lr": 1e-3, "path": Path("data"), "optim": {"betas": (0.9, 0.95)}})
    run.config(seed=1)
    run.config(seed=1)
    run.note("two epochs\nof the old mixture", step=2, tags=("data",))
    run.alert("reward hacked", step=2)
    assert logged(tmp_path) == [(1, {"loss": 2.5, "lr": 1e-3}), (2, {"train/loss": 2.25, "grad_norm": math.inf})]
    settings = entries(tmp_path, "launch.settings")
    assert len(settings) == 2 and settings[-1].launch == 1
    assert settings[-1].data["values"] == {"lr": 1e-3, "path": "data", "optim": {"betas": [0.9, 0.95]}, "seed": 1}
    note, alert = entries(tmp_path, "note")[0], entries(tmp_path, "incident")[0]
    assert (note.title, note.step, note.data["text"], note.data["tags"]) == (
        "two epochs",
        2,
        "of the old mixture",
        ["data"],
    )
    assert (alert.title, alert.data["tier"], alert.data["kind"], alert.launch) == ("reward hacked", "warn", "alert", 1)


def test_outside_a_launch_nothing_is_written_and_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Recording({})
    for step in range(3):
        run.log(step, loss=1.0)
    run.config(a=1)
    run.note("x")
    run.alert("y", tier="nonsense")
    said = capsys.readouterr().err.splitlines()
    assert said == ["chronicle: nothing is recorded: this process was not started by `chronicle run -- …`"]
    assert list(tmp_path.iterdir()) == []


def test_only_the_main_rank_logs_and_any_rank_may_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recording(environment(tmp_path, RANK="3"))
    run.log(1, loss=1.0)
    run.config(a=1)
    run.note("rank 3 saw it")
    assert logged(tmp_path) == [] and entries(tmp_path, "launch.settings") == [] and len(entries(tmp_path, "note")) == 1
    assert capsys.readouterr().err == ""


class Strange:
    def __float__(self) -> float:
        raise AssertionError("not today")

    def __repr__(self) -> str:
        raise AssertionError("nor this")


class Unlistable(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Any:
        raise KeyError("no keys for you")

    def __len__(self) -> int:
        return 1


def test_a_title_of_many_settings_ends_after_a_whole_name(tmp_path: Path) -> None:
    names = [f"per_device_train_batch_size_{i}" for i in range(9)]
    Recording(environment(tmp_path)).config(dict.fromkeys(names, 1))
    (entry,) = read_journal(RunPaths(Path(environment(tmp_path)["CHRONICLE_RUN_DIR"]))).of_kind("launch.settings")
    assert entry.title.endswith(", …") and len(entry.title) <= 200
    assert set(entry.title.partition(": ")[2].split(", ")) <= {*names, "…"}


def test_what_is_no_number_is_left_out_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Recording(environment(tmp_path))
    for _ in range(2):
        run.log(1, loss=1.0, name=[1, 2], strange=Strange(), vector=torch.zeros(3), t=5)
        run.log("seven", loss=1.0)  # type: ignore[arg-type]
        run.log(1.5, loss=1.0)  # type: ignore[arg-type]
        run.log(2.0, loss=2.0)  # type: ignore[arg-type]
        run.log(3, None, nothing=None)
    assert logged(tmp_path)[:2] == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    said = capsys.readouterr().err
    assert said.count("no numbers, left out: `name`, `strange`, `vector`, `t`") == 1
    assert said.count("the step is 'seven': expected a whole number") == 1
    run.config(Unlistable())
    assert "settings of the script not recorded (KeyError" in capsys.readouterr().err
    run = Recording(environment(tmp_path))
    run.config(strange=Strange(), many={1, 2}, big="x" * 100_000)
    assert "larger than 65536 bytes" in capsys.readouterr().err
    run.config(strange=Strange(), many={1, 2}, deep={"a": {"b": float("nan")}})
    assert entries(tmp_path, "launch.settings")[0].data["values"] == {
        "strange": "Strange",
        "many": [1, 2],
        "deep": {"a": {"b": "nan"}},
    }


@pytest.mark.parametrize(
    ("step", "values", "said"),
    [
        (1, {"strange": Strange()}, "no numbers, left out: `strange`"),
        (1, Unlistable(), "a line is left out (KeyError"),
        (math.inf, {"loss": 1.0}, "the step is inf: expected a whole number"),
        (Strange(), {"loss": 1.0}, "the step is Strange: expected a whole number"),
    ],
)
def test_whatever_is_handed_over_nothing_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: Any, values: Any, said: str
) -> None:
    run = Recording(environment(tmp_path))
    run.log(step, values)
    assert said in capsys.readouterr().err and logged(tmp_path) == []
    run.note(Strange(), step=1)  # type: ignore[arg-type]
    assert [entry.title for entry in entries(tmp_path, "note")] == ["Strange"]


def test_a_log_that_cannot_be_written_ends_and_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = environment(tmp_path)
    (Path(given["CHRONICLE_LAUNCH_DIR"]) / "metrics.jsonl").mkdir()
    run = Recording(given)
    run.log(1, loss=1.0)
    run.log(2, loss=1.0)
    assert capsys.readouterr().err.count("the per-step log stops here") == 1


@pytest.mark.parametrize(
    ("name", "secret"),
    [("hf_token", True), ("apiKey", True), ("WANDB_API_KEY", True), ("db.password", True), ("aws_secret_access_key", True),
     ("max_tokens", False), ("tokenizer", False), ("key", False), ("num_key_value_heads", False), ("author", False),
     ("lr", False)],
)  # fmt: skip
def test_settings_that_look_like_secrets_are_hidden(name: str, secret: bool) -> None:
    assert looks_secret(name) is secret
    assert (plain_settings({name: "abc"})[name] == HIDDEN) is secret


def test_secret_values_are_hidden_whatever_their_name() -> None:
    found = plain_settings(
        {"uri": "postgres://me:word@db/x", "hub": "hf_" + "a" * 30, "plain": "https://host/x", "n": {"token": "x"},
         "signed": "https://host/x?X-Amz-Signature=1f", "shared": "https://host/x?sv=2&sig=1f", "asked": "https://host/x?design=1f"}
    )
    assert found == {"uri": HIDDEN, "hub": HIDDEN, "plain": "https://host/x", "n": {"token": HIDDEN}, "signed": HIDDEN,
                     "shared": HIDDEN, "asked": "https://host/x?design=1f"}


SCRIPT = """
import sys, chronicle
chronicle.config({"lr": 0.1})
for step in range(1, 4):
    chronicle.log(step, loss=1.0 / step)
chronicle.note("done")
assert not {"torch", "numpy", "typer", "mlflow"} & set(sys.modules), sys.modules.keys()
"""


def test_module_functions_in_a_launch_of_their_own_without_torch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "chronicle_ml",
        "run",
        "--run",
        "tr",
        "--logs",
        str(tmp_path / "logs"),
        "--",
        sys.executable,
        str(script),
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CHRONICLE_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in logged(tmp_path)] == [1, 2, 3]
    assert entries(tmp_path, "launch.settings")[0].data == {"values": {"lr": 0.1}, "source": "the script"}
    assert json.dumps(entries(tmp_path, "note")[0].title) == '"done"'
