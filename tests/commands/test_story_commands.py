"""status, log, show, close, audit, render on the toy run: the story that eight trackers tell wrongly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.errors import Refusal
from chronicle.journal.events import Incident
from chronicle.metrics import MetricsWriter
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli


def test_the_headline_loss_is_that_of_the_lineage_not_of_the_abandoned_launch(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    shown = chronicle("status", "--json").json
    assert (shown["step"], shown["launch"], shown["loss"]) == (8, 2, 8.2)
    assert shown["values"]["lr"] == 2.5e-5
    assert "100" not in chronicle("status").out


def test_after_a_rollback_and_before_the_next_launch_the_headline_is_the_targets(tmp_path: Path, chronicle: Cli) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {s: {"loss": float(s)} for s in range(1, 11)})
    run.end(1, 10)
    run.rollback(5, 0.5)
    shown = chronicle("status", "--json").json
    assert (shown["step"], shown["loss"]) == (5, 5.0)
    assert shown["lr"]["pending_factor"] == 0.5


def test_status_marks_a_lineage_that_no_guard_recorded(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    row = " ".join(chronicle("status").out.partition("\nlineage")[2].split())
    assert row.startswith("2 launches, 5 steps abandoned · inferred: no guard recorded what launch 2 loaded")
    shown = chronicle("status", "--json").json
    assert shown["inferred"] is True and [part["inferred"] for part in shown["lineage"]] == [True, True]
    saved = {"id": "X", "run_id": run.writer.place.run_id, "launch": 1, "step": 5}
    first = {"verdict": "passed", "checks": [], "basis": "fresh", "run_id": saved["run_id"]}
    run.add("guard.verdict", launch=1, step=0, data=first)
    run.add("guard.verdict", launch=2, step=5, data={**first, "basis": "manifest", "loaded": saved})
    shown = chronicle("status", "--json").json
    assert shown["inferred"] is False and [part["inferred"] for part in shown["lineage"]] == [False, False]
    assert "inferred" not in chronicle("status").out


def test_status_says_when_the_logged_lr_does_not_follow_the_ledger(tmp_path: Path, chronicle: Cli) -> None:
    """exp8 and exp9: the LR restarted from zero and nobody saw it for days."""
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {s: {"loss": 2.0, "lr": 5e-5} for s in range(1, 60)})
    run.end(1, 59)
    run.rollback(30, 0.5)
    run.start(2, 30)
    run.metrics(2, {s: {"loss": 2.0, "lr": (s - 30) * 1e-7} for s in range(31, 50)})
    shown = chronicle("status", "--json").json
    assert shown["lr"]["follows"] is False
    assert "does NOT agree" in chronicle("status").out


def test_a_warm_up_that_was_asked_for_is_judged_when_it_is_over(tmp_path: Path, chronicle: Cli) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {s: {"loss": 2.0, "lr": 5e-5} for s in range(1, 60)})
    run.end(1, 59)
    run.rollback(30, 0.5, warmup_steps=10)
    run.start(2, 30)
    run.metrics(2, {s: {"loss": 2.0, "lr": 2.5e-5 * (s - 30) / 10} for s in range(31, 38)})
    assert chronicle("status", "--json").json["lr"]["follows"] is None
    run.metrics(2, {s: {"loss": 2.0, "lr": 2.5e-5} for s in range(40, 50)})
    assert chronicle("status", "--json").json["lr"]["follows"] is True


def test_status_of_a_healthy_rollback_says_that_the_lr_follows(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    assert chronicle("status", "--json").json["lr"]["follows"] is True


def diverged_run(root: Path) -> StoryRun:
    """Nobody has gone back yet."""
    run = StoryRun(root)
    run.start(1, 0)
    run.metrics(1, {s: {"loss": 1.0} for s in range(1, 11)})
    run.add("incident", launch=1, step=8, title="divergence from step 8", data={"kind": "divergence", "tier": "propose"})
    return run


def test_an_open_incident_is_nagged_until_it_is_closed(tmp_path: Path, chronicle: Cli) -> None:
    diverged_run(tmp_path)
    incident = chronicle("status", "--json").json["open_incidents"][0]["id"]
    done = chronicle("close", incident[-8:], "no spike since", "--outcome", "worked")
    assert done.code == 0
    assert chronicle("status", "--json").json["open_incidents"] == []


def test_an_incident_says_what_a_replay_or_a_relaunch_found_out(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.metrics(1, {step: {"loss": 2.0} for step in range(1, 40)})
    (run.paths.launch_dir(1) / "prints-0.ring").touch()
    run.add("incident", launch=1, step=30, data={"kind": "spike", "tier": "warn", "status": "open", "onset_step": 30})

    def told() -> str:
        return " ".join(chronicle("status").out.split())

    def refuse() -> None:
        raise Refusal("no private network namespace", "--network lets it")

    monkeypatch.setattr("chronicle.replay.plan.ensure_network_closes", refuse)
    assert "cause not known: no replay: no private network namespace (--network lets it)" in told()
    monkeypatch.setattr("chronicle.replay.plan.ensure_network_closes", lambda: None)
    assert "cause not known: `chronicle replay 30 --launch 1`" in told()
    run.add("replay", launch=1, step=30, data={"verdict": "data differ", "why": "another batch at step 30", "until": 31})
    assert "replayed: data differ (another batch at step 30)" in told() and "cause not known" not in told()
    again = {"verdict": "equal", "why": "the rise came again", "earlier": 1, "rise": 30, "came_again": True, "start": 20}
    run.add("retaken", launch=2, step=20, data=again)
    assert "taken again by launch 2: the rise came again" in told()
    run.add("retaken", launch=3, step=20, data={**again, "why": "not of this incident", "rise": 31})
    assert "not of this incident" not in told()


def test_a_rollback_behind_an_incident_answers_it_until_it_is_undone(tmp_path: Path, chronicle: Cli) -> None:
    """The weights no longer descend from the steps where it began; what came of the rollback is the open question."""
    run = diverged_run(tmp_path)
    incident = chronicle("status", "--json").json["open_incidents"][0]["id"]
    receipt = run.rollback(5, 0.5)
    shown, screen = chronicle("status", "--json").json, chronicle("status").out
    assert shown["open_incidents"] == [] and shown["open_outcomes"] == [receipt.id]
    assert f"{receipt.id[-8:]} rollback to 5 (answers incident {incident[-8:]})" in screen
    run.start(2, 5)
    run.metrics(2, {s: {"loss": 1.0} for s in range(6, 20)})
    assert chronicle("status", "--json").json["open_incidents"] == []
    again = run.add("incident", launch=2, step=8, title="the same again", data={"kind": "divergence", "tier": "propose"})
    assert [x["id"] for x in chronicle("status", "--json").json["open_incidents"]] == [again.id]
    chronicle("report", "--markdown", "--no-plots")
    assert "answered by the rollback to 5" in run.paths.chronicle_md.read_text()
    run.add("undo.receipt", refs=(receipt.id,))
    assert incident in [x["id"] for x in chronicle("status", "--json").json["open_incidents"]]


def test_a_rollback_that_stops_short_of_the_onset_answers_nothing(tmp_path: Path, chronicle: Cli) -> None:
    run = diverged_run(tmp_path)
    run.rollback(9)
    assert len(chronicle("status", "--json").json["open_incidents"]) == 1


def test_an_answered_incident_can_still_be_closed(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    assert chronicle("close", "00000006", "it was the data", "--outcome", "worked").code == 0
    chronicle("report", "--markdown", "--no-plots")
    text = run.paths.chronicle_md.read_text()
    assert "it was the data" in text and "answered by" not in text


def test_close_open_is_the_only_open_entry_and_asks_which_where_there_are_two(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    assert chronicle("close", "open", "--outcome", "worked").code == 0
    assert chronicle("status", "--json").json["open_outcomes"] == []
    none = chronicle("close", "open", "--outcome", "worked")
    assert (none.code, "0 entries are open" in none.err) == (2, True)
    ids = [run.rollback(6).id[-8:], run.rollback(5).id[-8:]]
    two = chronicle("close", "open", "--outcome", "worked")
    assert two.code == 2 and all(entry_id in two.err for entry_id in ids)


def test_a_note_closes_an_entry_and_takes_nothing_that_an_outcome_has_not(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    assert chronicle("note", "--close", "open", "the data", "--outcome", "worked", "--rule", "look twice").code == 0
    assert chronicle("note", "--close", "00000006", "--outcome", "worked", "--step", "4").code == 2
    assert chronicle("note", "--outcome", "worked").code == 2


def test_close_without_an_outcome_writes_nothing_and_names_the_choices(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    before = len(chronicle("log", "--json").json)
    done = chronicle("close", "00000006", "whatever")
    assert done.code == 2
    assert "worked|failed|partly" in done.err
    assert len(chronicle("log", "--json").json) == before


def test_close_refuses_what_has_no_outcome(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    saved = run.add("checkpoint", launch=2, step=8)
    assert chronicle("close", saved.id, "--outcome", "worked").code == 2


def test_a_resumed_launch_without_a_guard_is_named_as_unverified(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.start(3, 8)
    run.end(3, 12)
    assert chronicle("status", "--json").json["unverified_launches"] == [3]
    assert "not verified by the guard: launch 3 (no verdict)" in chronicle("status").out
    run.add("guard.verdict", launch=3, step=8, data={"verdict": "unverified", "checks": []})
    shown = " ".join(chronicle("status").out.split())
    assert "not verified by the guard: launch 3" in shown and "no verdict" not in shown, "it has one"


def test_an_intent_without_a_receipt_is_shown_with_the_way_out(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    intent = run.add("rollback.intent", step=5)
    shown = chronicle("status")
    assert intent.id[-8:] in shown.out and "chronicle recover" in shown.out


def test_a_proposal_is_shown_with_its_exact_command_until_a_rollback_answers_it(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    command = "chronicle rollback --to 5 --lr-scale 0.25 --yes"
    run.add("proposal", step=5, title="go back to 5", data={"target_step": 5, "lr_scale": 0.25, "command": command})
    assert chronicle("status", "--json").json["proposal"]["command"] == command
    assert command in chronicle("status").out
    run.rollback(5, 0.25)
    assert chronicle("status", "--json").json["proposal"] is None


def test_the_graph_of_the_toy_run(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    expected = """\
*    launch 2 · steps 6–8 · inferred · LR ×0.5 · loss 8.2 · ended with code 0 · 2026-05-18 14:36 +00:00
g    guard passed: resume verified (step 5)  0000000B
R    rollback to 5, LR ×0.5  00000009
| x  launch 1 · steps 6–10 · abandoned · LR ×1 · loss 100 · ended by SIGINT · 2026-05-18 14:31 +00:00
| !  divergence from step 8  00000006
| o  checkpoint 10
|/
*    launch 1 · steps 1–5 · LR ×1 · loss 9.5
o    checkpoint 5
"""
    assert chronicle("log", "--graph").out == expected


def test_the_graph_tells_an_incident_once_and_leaves_bookkeeping_to_the_log(tmp_path: Path, chronicle: Cli) -> None:
    """The detector writes every change of an incident; at 3 a.m. its last word is what one wants to read."""
    run = StoryRun(tmp_path)
    run.start(1, 0)
    for status in ("open", "diverging", "recovered"):
        run.add("incident", launch=1, step=8, title=f"spike since step 8, {status}", data={"id": 3, "status": status})
    run.add("incident", launch=1, step=9, title="another since step 9", data={"id": 4, "status": "open"})
    run.add("guard.digest", launch=1, step=9, title="batches seen")
    run.end(1, 10)
    shown = chronicle("log", "--graph").out
    assert shown.count("spike since") == 1 and "spike since step 8, recovered" in shown
    assert "another since step 9" in shown and "batches seen" not in shown
    assert "batches seen" not in chronicle("log").out
    assert "batches seen" in chronicle("log", "--all").out and "batches seen" in chronicle("log", "--kind", "guard.digest").out
    first = next(e["id"] for e in reversed(chronicle("log", "--kind", "incident", "--json").json))
    assert f"recovered  {first[-8:]}" in shown  # the id by which every view knows it


def test_the_graph_nests_a_fork_inside_an_abandoned_stretch(tmp_path: Path, chronicle: Cli) -> None:
    """exp2: back to before the start of the launch that is abandoned."""
    run = StoryRun(tmp_path)
    for number, start, last in ((1, 0, 100), (2, 80, 120), (3, 50, 60)):
        if number > 1:
            run.rollback(start)
        run.start(number, start)
        run.end(number, last)
    lanes = [line[:6].rstrip() for line in chronicle("log", "--graph").out.splitlines()]
    assert lanes == ["*", "R", "| x", "| R", "| | x", "| |/", "| x", "|/", "*"]


def test_a_rollback_stands_by_the_launch_that_trained_after_it_not_by_one_that_was_refused(
    tmp_path: Path, chronicle: Cli
) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    run.end(1, 100)
    run.rollback(50, 0.5)
    run.start(2, None)
    run.add("guard.verdict", launch=2, step=50, title="guard: refused before the first step", data={"verdict": "refused"})
    run.end(2, None, exit_code=78)
    run.start(3, 50)
    run.end(3, 120)
    lines = chronicle("log", "--graph").out.splitlines()
    assert [line[:4].rstrip() for line in lines] == ["*", "R", "| x", "| g", "|/", "| x", "|/", "*"]
    chronicle("report", "--markdown", "--no-plots")
    assert "none; it would have resumed at step 50" in run.paths.chronicle_md.read_text()


def test_lines_fit_a_terminal_and_are_whole_elsewhere(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    entry = run.add("note", title="word " * 40)
    run.end(1, 3)
    for words in (("log", "--graph"), ("log",)):
        assert "word " * 39 in chronicle(*words).out
    monkeypatch.setattr("chronicle.cli.log._columns", lambda: 80)
    for words in (("log", "--graph"), ("log",)):
        lines = chronicle(*words).out.splitlines()
        assert max(map(len, lines)) == 80 and any(entry.id[-8:] in line for line in lines)


def test_what_the_detector_and_a_proposal_said_is_told_in_sentences(tmp_path: Path, chronicle: Cli) -> None:
    run = StoryRun(tmp_path)
    run.start(1, 0)
    event = {"id": 1, "kind": "level-shift", "channels": ["loss", "grad_norm"], "onset_step": 302, "onset_low_step": 299}
    event |= {"alarm_step": 303, "peak_step": 306, "excess": 0.52132, "sigmas": 17.98, "onset_row": 301}
    run.add("incident", launch=1, step=302, title="level-shift", data=event)
    command = "chronicle rollback --to 200"
    proposal = {"target_step": 200, "command": command, "cost_steps": 134, "reasons": ["the *lr* rose"]}
    proposal["alternatives"] = [{"step": 150, "launch": 1, "cost_steps": 184}]
    run.add("proposal", launch=1, step=200, title="back to 200", data=proposal)
    chronicle("report", "--markdown", "--no-plots")
    page = run.paths.chronicle_md.read_text()
    seen = "level-shift on loss, grad_norm, onset at step 302 (at the earliest 299), alarm at 303, peak +0.5213 (17.98 σ)"
    assert f"**Measured.** {seen} at 306" in page and "onset_row" not in page
    assert f"**Proposed.** `{command}` discards 134 steps" in page and "**Reasons.** the \\*lr\\* rose" in page
    assert "**Alternatives.** to 150 of launch 1 (184 steps)" in page


def test_json_stays_json_where_the_terminal_knows_only_ascii(tmp_path: Path) -> None:
    toy_run(tmp_path).add("note", title="größer → 1")
    words = [sys.executable, "-m", "chronicle.cli.main", "log", "--json"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert json.loads(done.stdout)[0]["title"] == "größer → 1"


def test_the_graph_has_colour_only_on_request(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run(tmp_path)
    assert "\x1b" not in chronicle("log", "--graph").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in chronicle("log", "--graph").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in chronicle("log", "--graph").out


def test_log_lists_newest_first_and_keeps_an_unknown_kind(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.add("moon.phase", title="full")
    assert "moon.phase" in chronicle("log").out.splitlines()[0]
    assert "moon.phase" in chronicle("log", "--graph").out
    assert chronicle("log", "--kind", "note").out == "\n" or chronicle("log", "--kind", "note").out == ""
    assert len(chronicle("log", "-n", "2").out.splitlines()) == 2


def test_show_prints_the_entry_and_what_refers_to_it(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    chronicle("close", "00000006", "it came back", "--outcome", "failed")
    shown = chronicle("show", "00000006")
    assert "divergence from step 8" in shown.out
    assert "referred by" in shown.out and "failed: divergence" in shown.out
    assert chronicle("show", "00000006", "--json").json["entry"]["step"] == 8


def test_show_of_no_such_entry_is_one_sentence(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    done = chronicle("show", "ZZZZZZZZ")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: no entry `ZZZZZZZZ`")


def test_render_is_deterministic_and_check_finds_a_stale_file(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    assert chronicle("report", "--markdown", "--check").code == 5
    assert chronicle("report", "--markdown", "--no-plots").code == 0
    first = run.paths.chronicle_md.read_bytes()
    assert chronicle("report", "--markdown", "--check").code == 0
    run.paths.chronicle_md.unlink()
    chronicle("report", "--markdown", "--no-plots")
    assert run.paths.chronicle_md.read_bytes() == first
    run.add("note", title="one more")
    assert chronicle("report", "--markdown", "--check").code == 5


def test_a_beating_heart_does_not_make_the_rendered_page_stale(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.start(3, 8)
    chronicle("report", "--markdown", "--no-plots")
    run.paths.heartbeats_dir.mkdir()
    beat = '{"v":1,"host":"h","launch":3,"pid":1,"start_ticks":1,"boot_id":"","uid":0,"t":9e9,"processes":[]}'
    (run.paths.heartbeats_dir / "h.json").write_text(beat)
    assert "running" in chronicle("status").out
    assert chronicle("report", "--markdown", "--check").code == 0


def test_status_of_the_abandoned_launch_alone_never_counts_a_torn_metrics_line(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    with run.paths.metrics_path(2).open("ab") as file:
        file.write(b'{"step":9,"loss":0.')
    assert chronicle("status", "--json").json["loss"] == 8.2


def test_headline_in_a_log_too_large_to_read_whole(tmp_path: Path, chronicle: Cli) -> None:
    """Above a mebibyte the place is found by halving; the answer is the same."""
    run = StoryRun(tmp_path)
    run.start(1, 0)
    with MetricsWriter(run.paths.metrics_path(1)) as log:
        for step in range(1, 60_001):
            log.write(step, {"loss": step / 7, "lr": 1e-3}, time=float(step))
    run.end(1, 60_000)
    for target in (1, 2, 31_007, 59_999):
        run.rollback(target)
        assert chronicle("status", "--json").json["values"]["loss"] == target / 7


def test_config_show_names_each_origin(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chronicle.toml").write_text('run = "from-file"\n')
    monkeypatch.setenv("CHRONICLE_LOGS", "elsewhere")
    shown = chronicle("config", "show", "--json").json
    assert shown["run"] == {"value": "from-file", "origin": str(tmp_path / "chronicle.toml")}
    assert shown["logs"]["origin"] == "CHRONICLE_LOGS"


def test_entry_of_a_newer_chronicle_is_shown_and_its_kind_decides_nothing(tmp_path: Path, chronicle: Cli) -> None:
    """An unknown kind changes nothing; an unknown version of a known kind is refused by name where it would be used."""
    run = toy_run(tmp_path)
    run.add("moon.phase", title="full moon", data={"v": 7, "phase": "full"})
    assert chronicle("status").code == 0
    assert "full moon" in chronicle("log", "--graph").out
    newer = run.add("launch.end", launch=2, title="ended", data={"v": 9, "exit_code": "fine"})
    refused = chronicle("status")
    assert refused.code == 1
    assert f"entry {newer.id}: `launch.end` in version 9: expected version 1" in refused.err
    assert "update chronicle" in refused.err
    assert "launch.end" in chronicle("log").out and "fine" in chronicle("show", newer.id).out


def test_status_begins_with_the_worst_news_and_fits_a_terminal(
    tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open incident comes before the loss; nothing but a command is wider than 80 columns. A pipe gets one line a row."""
    monkeypatch.setenv("COLUMNS", "80")
    run = toy_run(tmp_path)
    shown = chronicle("status").out.splitlines()
    assert shown[0].startswith("run toy ") and all(len(line) <= 80 for line in shown)
    said = "spike at step 8, " + "loss 9.1 against 2.0 of the last hundred points, " * 3
    run.writer.write(Incident(kind="instant-spike", tier="warn", status="open"), step=8, launch=2, title=said)
    lines = chronicle("status").out.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names.index("open") < names.index("loss"), names
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert " ".join(said.split()) in " ".join(" ".join(lines).split())
    assert "\x1b" not in "".join(lines)
    monkeypatch.delenv("COLUMNS")
    assert any(line.startswith("open ") and " ".join(said.split()) in line for line in chronicle("status").out.splitlines())


def test_status_is_coloured_on_a_terminal_only(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy_run(tmp_path)
    run.writer.write(Incident(kind="instant-spike", tier="warn", status="open"), step=8, launch=2, title="spike at step 8")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b[31;1mopen" in chronicle("status").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in chronicle("status").out
