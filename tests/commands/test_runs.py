"""Many runs: `runs`, `compare`, `diff --launch`, and `chronicle.open` for scripts."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest

import chronicle as package
from chronicle.alerts.messages import alerts_of
from chronicle.errors import ChronicleError
from chronicle.journal.events import Incident, LaunchEnd, LaunchSettings, LaunchStart, Note
from chronicle.journal.writer import JournalWriter, store_bytes
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import HIDDEN, changes_between, settings_of
from chronicle.story.read import read_story
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
    assert "1 of 4 runs are not listed: `loss < 10` asks for something that they do not have" in shown.err
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == ["a", "b", "c"]
    told = chronicle("runs", "--where", "not nothing_of_this_name or status == running and loss < 1").err
    assert "4 of 4 runs are not listed" in told and "no run at all has `nothing_of_this_name`, `running`" in told
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


def test_did_the_rollback_help_by_the_abandoned_steps_beside_the_same_steps_taken_again(
    tmp_path: Path, chronicle: Cli
) -> None:
    """Both columns were the lineage of the whole run, equal in every cell (a newcomer's case)."""
    toy_run(tmp_path)
    told = chronicle("compare", "toy@1", "toy@2", "--json").json
    first, second = told["runs"]
    assert (first["launch"], first["abandoned"], first["lr"]) == (1, 5, 5e-5)
    assert (second["launch"], second["abandoned"], second["lr"], second["last"]) == (2, 0, 2.5e-5, [8, 8.2])
    assert told["difference"]["steps"] == 3 and told["difference"]["low"] == pytest.approx(8.2 - 100.0)
    shown = chronicle("compare", "toy@1", "toy@2").out
    assert "launch 1, 5 steps abandoned" in shown and "toy@2 minus toy@1, over 3 common steps:" in shown
    assert "did it help: `chronicle compare toy@1 toy@2`" in chronicle("status", "--run", "toy").out


def test_the_settings_of_a_launch_and_what_changed_in_them(logs: Path, chronicle: Cli) -> None:
    shown = chronicle("settings", "b")
    assert "lr" in shown.out and "0.001" in shown.out and "optim.betas" in shown.out
    assert chronicle("settings", "b", "--json").json["settings"]["seed"] == 1
    paths = RunPaths(logs / "b")
    with JournalWriter(paths) as writer:
        writer.write(LaunchStart(argv=("torchrun", "train.py", "--lr", "0.002"), host="node1"), launch=2, title="launch 2")
    changed = chronicle("settings", "b@2", "--diff").out
    assert "lr: 0.001 → 0.002" in changed and "seed: 1 → not recorded" in changed
    first = chronicle("settings", "b@1", "--diff")
    assert first.code == 1 and "launch 1 is the first of run `b`" in first.err


def test_another_run_is_used_from_here_on(logs: Path, chronicle: Cli) -> None:
    file = logs.parent / "chronicle.toml"
    assert chronicle("use", "b").code == 0 and file.read_text() == 'run = "b"\n'
    file.write_text('# ours\nrun = "b"  # the newest\nutc = true\n')
    assert chronicle("use", "a", cwd=logs).code == 0 and file.read_text() == '# ours\nrun = "a"\nutc = true\n'
    assert chronicle("status", cwd=logs.parent).out.startswith("run a ")
    assert "found `a`, `b`, `c`" in chronicle("use", "z").err and 'run = "a"' in file.read_text()


def test_two_runs_without_a_common_step_have_no_difference(tmp_path: Path, chronicle: Cli, logs: Path) -> None:
    assert chronicle("compare", "a", "--json").json["difference"] is None
    assert chronicle("compare", "a", "a@1", "--json").json["difference"]["median"] == 0


def test_compare_says_what_it_was_not_given(logs: Path, chronicle: Cli) -> None:
    assert "found `b`" not in chronicle("compare", "a", "zz").err and chronicle("compare", "a", "zz").code == 1
    assert "it has 1" in chronicle("compare", "a@7").err
    assert "logged are `loss`, `lr`" in chronicle("compare", "a", "--channel", "accuracy").err
    assert chronicle("compare", "a", "--out", "x.txt").code == 2


def test_two_arms_at_several_seeds_get_the_verdict_of_the_studies(tmp_path: Path, chronicle: Cli) -> None:
    """Arms are told apart by what was recorded; directories and names of runs tell nothing."""
    pytest.importorskip("scipy")
    logs, noise = tmp_path / "logs", (0.00, 0.03, -0.02, 0.01, -0.01, 0.02)
    for arm, (lr, shift) in {"low": (1e-4, 0.0), "high": (1e-3, 0.2), "same": (2e-4, 0.001)}.items():
        for seed, more in enumerate(noise):
            own = 0.004 * ((seed * 7 + len(arm)) % 5 - 2)  # of this run alone
            paths = make(logs, f"{arm}-{seed}", lr=lr, loss=2 + shift + more + own, steps=6)
            with JournalWriter(paths) as writer:
                settings = {"train": {"seed": seed}, "output_dir": f"out/{arm}-{seed}"}
                writer.write(LaunchSettings(values=settings, source="the script"), launch=1)

    def runs(*arms: str, seeds: int = 6) -> list[str]:
        return [f"{arm}-{seed}" for arm in arms for seed in range(seeds)]

    assert "lr=0.0001 and lr=0.001: `--margin VALUE`" in chronicle("compare", *runs("low", "high")).err
    told = chronicle("compare", *runs("low", "high"), "--margin", "0.05", "--json").json["verdict"]
    assert told["verdict"] == "difference" and told["mean"] == pytest.approx(0.2, abs=0.01) and told["pairs"] == 6
    assert told["arms"]["lr=0.001"] == runs("high")
    same = chronicle("compare", *runs("low", "same"), "--margin", "0.05").out
    assert "over seeds, at the last common place: equivalent" in same and "lr=0.0002 − lr=0.0001 = +0.00" in same
    few = chronicle("compare", *runs("low", "high", seeds=3), "--margin", "0.05").out
    assert "inconclusive" in few and "3 independent units are too few for a verdict, 4 are the least" in few
    for wrong in (runs("low", seeds=2), runs("low", "high", "same", seeds=2)):
        refused = chronicle("compare", *wrong, "--margin", "0.05")
        assert refused.code == 2 and "expected runs of two arms" in refused.err
    assert chronicle("compare", "low-0", "--margin", "0").code == 2


def test_settings_of_two_launches_names_each_setting_that_changed(tmp_path: Path, chronicle: Cli) -> None:
    paths = make(tmp_path / "logs", "a", lr=3e-4)
    with JournalWriter(paths) as writer:
        start = LaunchStart(argv=("train.py", "--lr", "1.5e-4", "--wd=0.1", "data.shards=8.0"), host="node2")
        writer.write(start, launch=2, title="launch 2")
        values = {"optim": {"betas": [0.9, 0.99]}, "seed": 1}
        writer.write(LaunchSettings(values=values, source="the script"), launch=2)
    shown = chronicle("settings", "@1", "@2")
    assert shown.out.splitlines() == [
        "fp16: True → not recorded", "host: node1 → node2", "lr: 0.0003 → 1.5e-4",
        "optim.betas: [0.9, 0.95] → [0.9, 0.99]", "wd: not recorded → 0.1",
    ]  # fmt: skip
    assert chronicle("settings", "@1", "@9").code == 1


def test_path_of_a_checkpoint_named_after_its_step_is_no_setting(tmp_path: Path, chronicle: Cli) -> None:
    """Lightning calls its files so; a setting of a group stays one."""
    paths = make(tmp_path / "logs", "a", lr=3e-4)
    argv = ("t.py", "ck/epoch=0-step=10.ckpt", "epoch=1-step=20.ckpt", "--init=x/a=1.pt", "--lr", "3e-4", "db/weights=a.txt")
    with JournalWriter(paths) as writer:
        writer.write(LaunchStart(argv=argv, host="node1"), launch=2, title="launch 2")
    shown = chronicle("settings", "@1", "@2").out
    assert "init: not recorded → x/a=1.pt" in shown and "db/weights: not recorded → a.txt" in shown and "epoch" not in shown


def test_settings_are_compared_as_values() -> None:
    assert changes_between({"lr": "3e-4", "bias": "True"}, {"lr": 0.0003, "bias": True}) == []
    assert [one.words for one in changes_between({"a": None}, {})] == []
    assert [one.words for one in changes_between({"a": "none"}, {})] != [], "what is not recorded is no `none`"
    assert settings_of((), 1) == {}


def test_open_reads_the_lineage_and_what_was_abandoned(tmp_path: Path) -> None:
    run = package.open(toy_run(tmp_path).paths.run_dir)
    kept, everything = run.curve("loss"), run.curve("loss", abandoned=True)
    assert kept.step == sorted(set(kept.step)) and all(kept.kept) and len(everything) > len(kept)
    assert not all(everything.kept) and kept.columns().keys() == {"step", "loss", "launch", "time", "kept"}
    assert [launch.number for launch in run.launches] == [1, 2] and run.entries
    with pytest.raises(ChronicleError, match="no channel `accuracy`: logged are `loss`"):
        run.curve("accuracy")
    with pytest.raises(ChronicleError, match=r"no run `logs` in `.*`: found `toy`"):
        package.open(tmp_path / "logs")


def test_open_finds_a_run_of_this_project_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert package.open("toy").curve("loss").step[-1] == 8
    with pytest.raises(ChronicleError, match=r"no run `tony` in `.*logs`: found `toy`"):
        package.open("tony")


def test_a_role_finds_the_channel_under_the_scripts_own_name(tmp_path: Path) -> None:
    paths = make(tmp_path, "a", lr=1e-3, steps=0)
    with MetricsWriter(paths.metrics_path(1)) as log:
        log.write(1, {"train/loss": 2.0, "train/lr": 0.1})
        log.write(2, {"train/loss": math.nan})
    run = package.open(paths.run_dir)
    assert (run.curve("loss").channel, run.curve("loss").value[0], run.curve("lr").value) == ("train/loss", 2.0, [0.1])
    assert json.dumps(run.summary()["settings"])


def test_settings_of_two_runs_names_settings_environment_and_packages(tmp_path: Path, chronicle: Cli) -> None:
    """Two launches by hand: what the settings hold is known of each, and the lists of packages lie in each run's objects."""
    lists = (b"numpy-2.1.0\ntorch-2.6.0+cpu\nscikit_learn-1.5", b"numpy-2.1.0\ntorch-2.7.1\nwandb-0.20.0")
    for name, listed in zip("ab", lists, strict=True):
        paths = RunPaths(tmp_path / "logs" / name)
        digest = store_bytes(paths, listed, "packages")["sha256"]
        environment = {"NCCL_ALGO": name, "SLURM_JOB_ID": name, "SLURM_JOB_PARTITION": "gpu"}
        with JournalWriter(paths) as writer:
            for number in (1, 2):
                start = LaunchStart(argv=("t.py", f"--lr={number}"), env_digest=digest, environment=environment)
                writer.write(start, launch=number, title=f"launch {number}")
    common = [
        "env.NCCL_ALGO: a → b", "package scikit_learn: 1.5 → not recorded", "package torch: 2.6.0+cpu → 2.7.1",
        "package wandb: not recorded → 0.20.0",
    ]  # fmt: skip
    assert chronicle("settings", "a", "b").out.splitlines() == common
    between = chronicle("settings", "a@1", "b@2")
    assert between.out.splitlines() == [common[0], "lr: 1 → 2", *common[1:]] and "a@1 → b@2" in between.err
    assert chronicle("settings", "@1", "@2", "--run", "a").out == "lr: 1 → 2\n"
    assert chronicle("runs", "--where", "env.NCCL_ALGO == 'b' and lr == 2", "--json").json[0]["name"] == "b"
    missing = chronicle("settings", "a", "3000")
    assert missing.code == 1 and "no run `3000`" in missing.err
    shutil.rmtree(tmp_path / "logs" / "b" / "objects")
    unknown = chronicle("settings", "a", "b")
    assert "environment: " in unknown.out and "was not kept for both" in unknown.err


def test_status_names_what_the_last_launch_has_otherwise(tmp_path: Path, chronicle: Cli) -> None:
    paths = make(tmp_path / "logs", "a", lr=3e-4)
    assert "changed" not in chronicle("status").out
    with JournalWriter(paths) as writer:
        argv = ("torchrun", "train.py", "--lr", "1e-4", "--fp16", "data.shards=8", "--a", "1", "--b", "2", "--c", "3")
        writer.write(LaunchStart(argv=argv, host="node2"), launch=2, title="launch 2")
        writer.write(LaunchSettings(values={"optim": {"betas": [0.9, 0.95]}, "seed": 1}, source="the script"), launch=2)
    row = " ".join(chronicle("status").out.partition("\nchanged")[2].split())
    told = "since launch 1: a not recorded → 1, b not recorded → 2, c not recorded → 3, 1 more: `chronicle settings @1 @2`"
    assert row.startswith(told)
    with JournalWriter(paths) as writer:
        event = Incident.view({"id": 1, "kind": "nan", "tier": "warn", "status": "open", "onset_step": 5})
        first = writer.write(event, launch=1, step=5, title="in launch 1").id
        second = writer.write(event, launch=2, step=5, title="in launch 2").id
    assert "has otherwise" not in chronicle("show", first).out
    assert "launch 2 has otherwise than launch 1:\n  a: not recorded → 1\n" in chronicle("show", second).out
    text = next(one.text for one in alerts_of(read_story(paths)) if one.title == "in launch 2")
    assert text == "changed since launch 1: a not recorded → 1, b not recorded → 2, c not recorded → 3, 1 more"


def test_secrets_on_a_command_line_are_not_shown(tmp_path: Path, chronicle: Cli) -> None:
    paths = RunPaths(tmp_path / "logs" / "a")
    with JournalWriter(paths) as writer:
        argv = ("train.py", "--hub-token", "hf_abc", "--url=https://me:word@host", "--max-tokens", "512")
        writer.write(LaunchStart(argv=argv, host="node1"), launch=1, title="launch 1")
    settings = chronicle("runs", "--json").json[0]["settings"]
    assert (settings["hub_token"], settings["url"], settings["max_tokens"]) == (HIDDEN, "https://me:***@host", "512")


# --- tree, tags, archive, other axes ---------------------------------------------------------------------------------------


@pytest.fixture
def forked(logs: Path, chronicle: Cli) -> Path:
    """`a` of 40 steps; `low` and `high`, which were copied from it at step 40 and went 40 and 20 steps on; `x` from `low`."""
    for name, origin, first, losses in (("low", "a", 41, 40), ("high", "a", 41, 20), ("x", "low", 81, 10)):
        shutil.copytree(logs / origin, logs / name)
        assert chronicle("init", "--fork-of", str(logs / origin), "--run", name).code == 0
        paths, number = RunPaths(logs / name), 2 if origin == "a" else 3
        with JournalWriter(paths) as writer:
            start = LaunchStart(argv=("train.py",), host="node1", start_step=first - 1)
            writer.write(start, launch=number, title=f"launch {number}")
            with MetricsWriter(paths.metrics_path(number)) as log:
                for step in range(first, first + losses):
                    values = {"loss": 10 * number + step / 100, "tokens": 1000.0 * (step - first)}
                    log.write(step, values, time=1.8e9 + 2 * step)
            writer.write(LaunchEnd(cause="finished", exit_code=0, last_step=first + losses - 1), launch=number)
    return logs


def test_forks_stand_below_the_run_that_their_ids_name(forked: Path, chronicle: Cli) -> None:
    """Also where the parent's directory has another name now: identity is carried."""
    lines = chronicle("runs", "--tree").out.splitlines()
    first = [re.split(r"  +(?=begins|step|finished|crash)", line)[0] for line in lines]
    assert first == ["name", "a", "├─ high", "└─ low", "   └─ x", "b", "c"]
    assert "step 40" in lines[2] and "step 80" in lines[4] and "step 40" not in lines[1]
    (forked / "a").rename(forked / "renamed")
    rows = chronicle("runs", "--tree", "--json").json
    assert [row["branch"] + row["name"] for row in rows] == ["b", "c", "renamed", "├─ high", "└─ low", "   └─ x"]
    alone = {row["name"]: row["begins"] for row in chronicle("runs", "x", "--tree", "--json").json}
    assert alone == {"x": "step 80 of low (not listed)"}


def test_a_circle_of_parents_lists_each_run_once(forked: Path, chronicle: Cli) -> None:
    for name, parent in (("low", "x"), ("x", "low")):
        record = json.loads((forked / name / "run.json").read_text())
        record["parent"]["run_id"] = json.loads((forked / parent / "run.json").read_text())["run_id"]
        (forked / name / "run.json").write_text(json.dumps(record))
    rows = chronicle("runs", "--tree", "--json").json
    assert sorted(row["name"] for row in rows) == ["a", "b", "c", "high", "low", "x"]


def test_tags_are_given_and_taken_off(logs: Path, chronicle: Cli) -> None:
    def tags() -> dict[str, list[str]]:
        return {row["name"]: row["tags"] for row in chronicle("runs", "--json").json}

    assert "journal of b, c" in chronicle("runs", "b", "c", "--add-tag", "sweep", "--add-tag", "night").err
    assert tags() == {"a": ["baseline"], "b": ["sweep", "night"], "c": ["sweep", "night"]}
    chronicle("runs", "b", "a", "--remove-tag", "sweep", "--remove-tag", "baseline")
    assert tags() == {"a": [], "b": ["night"], "c": ["sweep", "night"]}
    chronicle("runs", "b", "--add-tag", "sweep")
    assert tags()["b"] == ["sweep", "night"]
    found = chronicle("runs", "--tag", "night", "--tag", "sweep").out.splitlines()[1:]
    assert [line.split()[0] for line in found] == ["b", "c"]


def test_archived_runs_are_left_out_said_and_shown_again(logs: Path, chronicle: Cli) -> None:
    before = sorted(path for path in logs.rglob("*") if "/journal/" not in str(path))
    chronicle("runs", "a", "--archive", "wrong tokenizer")
    shown = chronicle("runs")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["name", "b", "c"] and "1 archived run is not" in shown.err
    assert "a (archived)" in chronicle("runs", "--all").out and "a (archived)" in chronicle("runs", "a").out
    assert "wrong tokenizer" in chronicle("log", "--run", "a", "--json").out
    assert {path for path in logs.rglob("*") if "/journal/" not in str(path)} >= set(before)
    chronicle("runs", "a", "--restore")
    assert len(chronicle("runs").out.splitlines()) == 4 and "archived" not in chronicle("runs").err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--add-tag", "t"], "no run is named"),
        (["nowhere", "--archive", "x"], "no run `nowhere`"),
        (["a", "--archive", "x", "--restore"], "one command cannot"),
        (["a", "--add-tag", "t", "--remove-tag", "t"], "one command cannot"),
    ],
)
def test_marks_that_make_no_sense_write_nothing(words: list[str], said: str, logs: Path, chronicle: Cli) -> None:
    before = [path.read_bytes() for path in sorted(logs.rglob("*.jsonl"))]
    done = chronicle("runs", *words)
    assert done.code in (1, 2) and said in done.err
    assert [path.read_bytes() for path in sorted(logs.rglob("*.jsonl"))] == before


def test_time_counts_within_launches(forked: Path, chronicle: Cli) -> None:
    told = chronicle("compare", "a", "b", "--by", "time", "--json").json  # one step a second, from 1 to 20
    assert told["at"][-1]["time"] == 19
    assert told["at"][-1]["values"] == pytest.approx([2.5, 1.5])
    assert chronicle("compare", "a", "b", "--by", "epoch").code == 2


def test_a_comparison_over_time_is_drawn(forked: Path, chronicle: Cli) -> None:
    assert chronicle("compare", "x", "high", "--by", "time", "--out", "time.svg").code == 0
    assert Path("time.svg").stat().st_size > 5000


def test_files_that_a_command_names_are_settings_and_its_words_count_more(tmp_path: Path, chronicle: Cli) -> None:
    """YAML, a DeepSpeed config and TOML as they were at the start; a secret is hidden, data is no settings."""
    text = "lr: 1e-3\nmodel:\n  width: 8\nname: base\nhub_token: hf_abcdefghijklmnopqrstuvwxyz0123\n"
    (tmp_path / "train.yaml").write_text(text)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "lr": 1}')
    (tmp_path / "rows.json").write_text("[1, 2]")
    words = ["run", "--run", "r", "--", sys.executable, "-c", "pass", "--config", "train.yaml", "--deepspeed=ds.json"]
    for lr in ("1e-4", "3e-4"):
        assert chronicle(*words, "rows.json", "--lr", lr, cwd=tmp_path).code == 0
        (tmp_path / "train.yaml").write_text("lr: 1e-3\nmodel:\n  width: 16\nname: base\n")
    run = package.open(tmp_path / "logs" / "r")
    first = run.settings(1)
    assert (first["lr"], first["model.width"], first["name"], first["zero_optimization.stage"]) == ("1e-4", 8, "base", 2)
    assert "hf_abc" not in "".join(path.read_text() for path in (tmp_path / "logs" / "r" / "journal").iterdir())
    told = chronicle("settings", "@1", "@2", "--run", "r", cwd=tmp_path).out
    assert "lr: 1e-4 → 3e-4" in told and "model.width: 8 → 16" in told and "name" not in told
