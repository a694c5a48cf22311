"""Many runs: `runs`, `compare`, `diff --launch`, and `chronicle.open` for scripts."""

import json
import math
from pathlib import Path

import pytest

import chronicle as package
from chronicle.errors import ChronicleError
from chronicle.journal.events import LaunchEnd, LaunchSettings, LaunchStart, Note
from chronicle.journal.writer import JournalWriter
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import HIDDEN, changes_between, settings_of
from tests.builders.story_runs import toy_run
from tests.commands.cli import Cli


def make(
    logs: Path,
    name: str,
    *,
    lr: float,
    cause: str = "finished",
    steps: int = 40,
    tags: tuple[str, ...] = (),
    loss: float = 2.0,
) -> RunPaths:
    """A run of one launch whose loss falls from `loss` + 1 to `loss`."""
    paths = RunPaths(logs / name)
    with JournalWriter(paths) as writer:
        argv = ("torchrun", "--nproc_per_node", "2", "train.py", "--lr", str(lr), "--fp16", "data.shards=8")
        writer.write(LaunchStart(argv=argv, host="node1"), launch=1, title="launch 1")
        writer.write(LaunchSettings(values={"optim": {"betas": [0.9, 0.95]}, "seed": 1}, source="the script"), launch=1)
        if tags:
            writer.write(Note(tags=tags), launch=1, title="why")
        with MetricsWriter(paths.metrics_path(1)) as log:
            for step in range(1, steps + 1):
                log.write(step, {"loss": loss + 1 - step / steps, "lr": lr}, time=1.7e9 + step)
        writer.write(LaunchEnd(cause=cause, exit_code=0 if cause == "finished" else 1), launch=1)
    return paths


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    make(directory, "a", lr=3e-4, tags=("baseline",))
    make(directory, "b", lr=1e-3, cause="crash", steps=20, loss=1.5)
    make(directory, "c", lr=1e-3, loss=1.0)
    return directory


def test_runs_are_listed_with_state_and_last_values(logs: Path, chronicle: Cli) -> None:
    shown = chronicle("runs")
    head, *rows = [line.split() for line in shown.out.splitlines()]
    assert head[:5] == ["name", "status", "step", "loss", "lr"]
    assert [row[:5] for row in rows] == [
        ["a", "finished", "40", "2", "0.0003"], ["b", "crash", "20", "1.5", "0.001"], ["c", "finished", "40", "1", "0.001"],
    ]  # fmt: skip
    found = {row["name"]: row for row in chronicle("runs", "--json").json}
    assert (
        found["a"]["tags"] == ["baseline"]
        and found["b"]["values"]["loss"] == 1.5
        and found["c"]["settings"]["seed"] == 1
    )


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("lr > 5e-4 and status != 'finished'", ["b"]),
        ("lr > 5e-4 or 'baseline' in tags", ["a", "b", "c"]),
        ("not loss < 1.5", ["a", "b"]),
        ("1 <= loss < 2", ["b", "c"]),
        ("status in ['crash', 'hang']", ["b"]),
        ("settings.seed == 1 and optim.betas == [0.9, 0.95]", ["a", "b", "c"]),
        ("data.shards == 8", ["a", "b", "c"]),
        ("fp16", ["a", "b", "c"]),
        ("-lr < -5e-4", ["b", "c"]),
    ],
)
def test_where_selects_by_columns_settings_and_channels(
    logs: Path, chronicle: Cli, where: str, names: list[str]
) -> None:
    assert [row["name"] for row in chronicle("runs", "--where", where, "--json").json] == names


def test_a_run_of_which_a_name_is_not_known_is_not_listed_and_counted(logs: Path, chronicle: Cli) -> None:
    make(logs, "d", lr=1e-4, steps=0)
    shown = chronicle("runs", "--where", "loss < 10")
    assert "1 of 4 runs not listed: `loss < 10` names what is not known of them" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == ["a", "b", "c"]
    assert "4 of 4 runs not listed" in chronicle("runs", "--where", "not nothing_of_this_name").err
    assert chronicle("runs", "--where", "status == 'finished' or unheard_of > 1").out.count("finished") == 3


@pytest.mark.parametrize(
    "where",
    [
        "__import__('os').system('x')",
        "lr >",
        "lr + 1 > 2",
        "loss = 1",
        "[x for x in tags]",
        "'a'.upper() == 'A'",
        "(" * 300,
    ],
)
def test_where_is_never_executed(logs: Path, chronicle: Cli, where: str) -> None:
    shown = chronicle("runs", "--where", where)
    assert shown.code == 2 and "is not understood" in shown.err and "Traceback" not in shown.err


def test_order_tags_and_a_directory_without_runs(logs: Path, chronicle: Cli, tmp_path: Path) -> None:
    assert [row["name"] for row in chronicle("runs", "--sort", "loss", "--json").json] == ["c", "b", "a"]
    assert [row["name"] for row in chronicle("runs", "--sort", "-lr", "--json").json] == ["b", "c", "a"]
    assert [row["name"] for row in chronicle("runs", "--tag", "baseline", "--json").json] == ["a"]
    assert chronicle("runs", "--sort", "nothing").code == 2
    empty = chronicle("runs", "--logs", str(tmp_path / "none"))
    assert (empty.code, empty.out.strip()) == (0, "") and "no run in" in empty.err


def test_a_damaged_run_is_a_row_that_says_so(logs: Path, chronicle: Cli) -> None:
    journal = next((logs / "b" / "journal").glob("*.jsonl"))
    journal.write_bytes(b'{"v":99,"id":1}\n' * 3)
    rows = {row["name"]: row for row in chronicle("runs", "--json").json}
    assert set(rows) == {"a", "b", "c"} and rows["a"]["status"] == "finished" and rows["b"]["status"] != "finished"


def test_compare_tells_equal_steps_and_the_settings_that_differ(logs: Path, chronicle: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "loss.svg"
    shown = chronicle("compare", "a", "b", "--out", str(picture))
    rows = {line.split("  ")[0]: line.split()[1:] for line in shown.out.splitlines() if line}
    assert rows["status"] == ["finished", "crash"]
    assert "settings that differ (1 of 5):" in shown.out and "lr  0.0003  0.001" in shown.out
    assert "optim.betas" not in shown.out and picture.read_bytes()[:5] == b"<?xml"
    found = chronicle("compare", "a", "b", "--json").json
    assert found["at"][-1] == {"step": 20, "values": [2.5, 1.5]}
    assert found["runs"][0]["best"] == [40, 2.0] and found["settings"] == [
        {"name": "lr", "values": ["0.0003", "0.001"]}
    ]


def test_compare_says_what_it_was_not_given(logs: Path, chronicle: Cli) -> None:
    assert "found `b`" not in chronicle("compare", "a", "zz").err and chronicle("compare", "a", "zz").code == 1
    assert "it has 1" in chronicle("compare", "a@7").err
    assert "logged are `loss`, `lr`" in chronicle("compare", "a", "--channel", "accuracy").err
    assert chronicle("compare", "a", "--out", "x.txt").code == 2


def test_diff_of_two_launches_names_each_setting_that_changed(tmp_path: Path, chronicle: Cli) -> None:
    paths = make(tmp_path / "logs", "a", lr=3e-4)
    with JournalWriter(paths) as writer:
        start = LaunchStart(argv=("train.py", "--lr", "1.5e-4", "--wd=0.1", "data.shards=8.0"), host="node2")
        writer.write(start, launch=2, title="launch 2")
        values = {"optim": {"betas": [0.9, 0.99]}, "seed": 1}
        writer.write(LaunchSettings(values=values, source="the script"), launch=2)
    shown = chronicle("diff", "--launch", "1", "2")
    assert shown.out.splitlines() == [
        "fp16: True → not recorded", "host: node1 → node2", "lr: 0.0003 → 1.5e-4",
        "optim.betas: [0.9, 0.95] → [0.9, 0.99]", "wd: not recorded → 0.1",
    ]  # fmt: skip
    assert chronicle("diff", "--launch", "1", "9").code == 1 and chronicle("diff").code == 2
    assert chronicle("diff", "3", "--launch", "1", "2").code == 2


def test_settings_are_compared_as_values() -> None:
    assert changes_between({"lr": "3e-4", "bias": "True"}, {"lr": 0.0003, "bias": True}) == []
    assert [one.words for one in changes_between({"a": None}, {})] == []
    assert settings_of((), 1) == {}


def test_open_reads_the_lineage_and_what_was_abandoned(tmp_path: Path) -> None:
    run = package.open(toy_run(tmp_path).paths.run_dir)
    kept, everything = run.curve("loss"), run.curve("loss", abandoned=True)
    assert kept.step == sorted(set(kept.step)) and all(kept.kept) and len(everything) > len(kept)
    assert not all(everything.kept) and kept.columns().keys() == {"step", "loss", "launch", "time", "kept"}
    assert [launch.number for launch in run.launches] == [1, 2] and run.entries
    with pytest.raises(ChronicleError, match="no channel `accuracy`: logged are `loss`"):
        run.curve("accuracy")
    with pytest.raises(ChronicleError, match="it holds no journal"):
        package.open(tmp_path / "logs")


def test_a_role_finds_the_channel_under_the_scripts_own_name(tmp_path: Path) -> None:
    paths = make(tmp_path, "a", lr=1e-3, steps=0)
    with MetricsWriter(paths.metrics_path(1)) as log:
        log.write(1, {"train/loss": 2.0, "train/lr": 0.1})
        log.write(2, {"train/loss": math.nan})
    run = package.open(paths.run_dir)
    assert (run.curve("loss").channel, run.curve("loss").value[0], run.curve("lr").value) == ("train/loss", 2.0, [0.1])
    assert json.dumps(run.summary()["settings"])


def test_status_names_what_the_last_launch_has_otherwise(tmp_path: Path, chronicle: Cli) -> None:
    paths = make(tmp_path / "logs", "a", lr=3e-4)
    assert "changed" not in chronicle("status").out
    with JournalWriter(paths) as writer:
        argv = ("torchrun", "train.py", "--lr", "1e-4", "--fp16", "data.shards=8", "--a", "1", "--b", "2", "--c", "3")
        writer.write(LaunchStart(argv=argv, host="node2"), launch=2, title="launch 2")
        writer.write(LaunchSettings(values={"optim": {"betas": [0.9, 0.95]}, "seed": 1}, source="the script"), launch=2)
    row = " ".join(chronicle("status").out.partition("\nchanged")[2].split())
    told = "since launch 1: a not recorded → 1, b not recorded → 2, c not recorded → 3, 1 more: `chronicle diff --launch 1 2`"
    assert row.startswith(told)


def test_secrets_on_a_command_line_are_not_shown(tmp_path: Path, chronicle: Cli) -> None:
    paths = RunPaths(tmp_path / "logs" / "a")
    with JournalWriter(paths) as writer:
        argv = ("train.py", "--hub-token", "hf_abc", "--url=https://me:word@host", "--max-tokens", "512")
        writer.write(LaunchStart(argv=argv, host="node1"), launch=1, title="launch 1")
    settings = chronicle("runs", "--json").json[0]["settings"]
    assert (settings["hub_token"], settings["url"], settings["max_tokens"]) == (HIDDEN, HIDDEN, "512")
