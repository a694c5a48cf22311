"""Words of others wherever some are taken: run, host, metric, source, file, signal, tag. Shown as typed, never obeyed."""

import re
from pathlib import Path

import pytest

from tests.builders.story_runs import StoryRun
from tests.commands.cli import Cli

EVIL = "\x1b[31mred\x1b]0;owned\x07<script>alert(1)</script>\u202e[x](javascript:alert(1))`|\r\n# top"
NAME = "loss/" + EVIL.replace("\r\n", " ")


@pytest.fixture
def hostile(tmp_path: Path) -> StoryRun:
    run = StoryRun(tmp_path, "hostile")
    run.add("run.init", title=EVIL)
    run.start(1, 0, argv=["torchrun", EVIL], host=EVIL, git_commit=EVIL, containment=EVIL)
    run.metrics(1, {s: {"loss": 2.0 - s / 300, NAME: 1.0, "lr": 1e-3, "grad_norm": 0.1} for s in range(1, 101)})
    run.add("checkpoint", launch=1, step=50, data={"path": f"checkpoints/{EVIL}/opt_step-50", "health": EVIL})
    event = {"id": 1, "kind": EVIL, "tier": "propose", "status": EVIL, "onset_step": 80, "channels": [NAME]}
    run.add("incident", launch=1, step=80, title=EVIL, data=event)
    proposal = {"target_step": 50, "command": f"chronicle rollback {EVIL}", "reasons": [EVIL]}
    run.add("proposal", launch=1, step=50, title=EVIL, data=proposal)
    run.end(1, 100, exit_code=None, signal=EVIL)
    receipt = run.rollback(50, 0.5)
    run.start(2, None, host=EVIL)
    checks = [{"name": EVIL, "expected": EVIL, "found": EVIL, "where": EVIL}]
    run.add("guard.verdict", launch=2, step=50, title=EVIL, data={"verdict": EVIL, "checks": checks})
    evidence = [{"kind": EVIL, "path": EVIL, "what": EVIL}, {"kind": "plot", "path": f"x/{EVIL}.png", "what": EVIL}]
    words = {"text": EVIL, "symptom": EVIL, "expect": EVIL, "rule": EVIL, "tags": [EVIL, "hardware"], "hosts": [EVIL]}
    words |= {"suspects": [{"cause": EVIL, "claim": EVIL, "test": EVIL, "verdict": EVIL}], "evidence": evidence}
    words |= {"action": {"verb": EVIL, "changes": [{"field": EVIL, "before": EVIL, "after": EVIL}]}}
    run.add("note", title=EVIL, step=60, data=words)
    run.add(EVIL, title=EVIL, data={EVIL: {EVIL: [EVIL]}})
    run.add("close", refs=(receipt.id,), title=EVIL, data={"outcome": EVIL, "text": EVIL})
    return run


READ = [
    ["status"], ["log"], ["log", "--graph"], ["log", "--all"], ["log", "--open"], ["costs"], ["audit"], ["spikes"],
    ["watch", "--once", "hostile"], ["hardware"], ["config", "show"], ["undo", "--list"], ["runs", "--tree"], ["settings"],
    ["compare", "hostile@1", "hostile@2"], ["inspect"], ["ps"], ["data", "usage"],
]  # fmt: skip


@pytest.mark.parametrize("words", READ, ids=" ".join)
def test_no_command_hands_a_control_character_to_the_terminal(words: list[str], hostile: StoryRun, chronicle: Cli) -> None:
    done = chronicle(*words)
    assert "Traceback" not in done.err
    for stream in (done.out, done.err):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", stream), stream
    assert "\n# top" not in done.out


def test_show_of_every_entry_is_safe_and_whole(hostile: StoryRun, chronicle: Cli) -> None:
    for entry in chronicle("log", "--all", "-n", "0", "--json").json:
        entry.pop("inferred", None)  # `log` adds it to the start of a launch
        shown = chronicle("show", entry["id"]).out
        assert "\x1b" not in shown and "\u202e" not in shown
        assert chronicle("show", entry["id"], "--json").json["entry"] == entry
    assert EVIL in [entry.get("title") for entry in chronicle("log", "--json").json]


def test_the_rendered_page_holds_the_words_as_text(hostile: StoryRun, chronicle: Cli) -> None:
    assert chronicle("render", "--no-plots").code == 0
    page = hostile.paths.chronicle_md.read_text()
    assert "\x1b" not in page and "\u202e" not in page and "\r" not in page
    outside = re.sub(r"`[^`\n]*`", "", page.replace("\\`", ""))  # a code span is code, whatever stands in it
    assert "<script" not in outside and not re.search(r"(?<!\\)\]\(javascript", outside)
    assert not [line for line in page.splitlines() if line.startswith("# top")]


def test_the_report_holds_the_words_as_text(hostile: StoryRun, chronicle: Cli) -> None:
    assert chronicle("report").code == 0
    page = hostile.paths.report_html.read_text()
    assert page.count("<script") == 2 and "<img" not in page
    assert 'href="javascript' not in page and "\x1b" not in page


def test_exports_and_pictures_take_such_names(hostile: StoryRun, chronicle: Cli) -> None:
    import csv
    import io

    rows = list(csv.reader(io.StringIO(chronicle("export").out)))
    assert NAME in rows[0] and all(len(row) == len(rows[0]) for row in rows)
    pytest.importorskip("matplotlib")
    assert chronicle("render").code == 0


def test_a_run_is_never_named_by_what_would_leave_its_directory(tmp_path: Path, chronicle: Cli) -> None:
    for name in ("../x", "a/b", "", ".", "..", "\x1b[31m", "a\nb", "<script>"):
        done = chronicle("note", "x", "--run", name)
        assert done.code in (0, 1, 2) and "\x1b" not in done.out + done.err, name
        assert done.code != 0 or (tmp_path / "logs" / name / "journal").is_dir()
    assert {path.name for path in tmp_path.iterdir()} <= {"logs"}
    assert chronicle("status", "--run", "\x1b[31mnone").err.count("\x1b") == 0
