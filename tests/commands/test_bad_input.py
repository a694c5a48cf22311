"""Bad input: one sentence, a documented code, nothing lost. Never a traceback."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from chronicle.errors import JournalError
from chronicle.journal import JournalWriter, read_journal
from chronicle.paths import RunPaths
from tests.builders.story_runs import StoryRun, toy_run
from tests.commands.cli import Cli, Outcome

READERS = (["status"], ["log"], ["log", "--graph"], ["show", "00000006"], ["audit"], ["render", "--no-plots"])


def one_sentence(done: Outcome) -> None:
    assert "Traceback" not in done.out + done.err
    assert done.err.count("error:") <= 1


def test_a_run_that_does_not_exist_is_an_error_with_the_candidates(tmp_path: Path, chronicle: Cli) -> None:
    toy_run(tmp_path)
    for words in READERS:
        done = chronicle(*words, "--run", "nope")
        assert (done.code, done.out) == (1, "")
        assert "no run `nope`" in done.err and "toy" in done.err
        one_sentence(done)
    assert not (tmp_path / "logs" / "nope").exists()


def test_the_newest_checkpoint_is_looked_for_and_none_is_named_beside_it(chronicle: Cli) -> None:
    for words in (["30500"], ["--all"], ["--write", "30500"]):
        done = chronicle("verify", "--newest", *words)
        assert (done.code, done.out) == (2, "") and "no CKPT" in done.err
        one_sentence(done)


def test_read_commands_say_where_nothing_was_ever_initialised(chronicle: Cli) -> None:
    for words in (["status"], ["log"], ["log", "--graph"], ["audit"]):
        done = chronicle(*words)
        assert done.code == 1 and "no journal here" in done.err
        one_sentence(done)


def test_a_corrupt_middle_line_is_named_and_everything_else_is_told(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    path = next(run.paths.journal_dir.glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"v":1,"id":"half\n'
    path.write_bytes(b"".join(lines))
    assert chronicle("status", "--json").json["loss"] == 8.2
    audited = chronicle("audit")
    assert audited.code == 5
    assert f"{path.name}:2" in audited.out and "bad-line" in audited.out
    assert "chronicle audit" in chronicle("status").out


def test_a_changed_line_breaks_the_chain_at_the_next_one(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    path = next(run.paths.journal_dir.glob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"lr_ratio":0.5', b'"lr_ratio":0.9'))
    audited = chronicle("audit", "--json")
    assert audited.code == 5
    assert [f["check"] for f in audited.json["findings"]] == ["broken-chain"]


def test_a_torn_last_line_costs_only_itself(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    before = len(read_journal(run.paths).entries)
    with next(run.paths.journal_dir.glob("*.jsonl")).open("ab") as file:
        file.write(b'{"v":1,"id":"01')
    assert len(read_journal(run.paths).entries) == before
    assert chronicle("status").code == 0
    assert "torn-line" in chronicle("audit").out
    assert chronicle("note", "still writing").code == 0
    assert len(read_journal(run.paths).entries) == before + 1


def test_a_line_of_a_newer_version_is_named_with_both_versions(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    path = next(run.paths.journal_dir.glob("*.jsonl"))
    path.write_bytes(path.read_bytes() + b'{"v":2,"id":"X"}\n')
    found = chronicle("audit").out
    assert "entry version 2: expected 1" in found


def test_two_writers_interleave_without_losing_an_entry(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    other = JournalWriter(run.paths, host="node-2", pid=7)
    for index in range(20):
        run.add("note", title=f"a{index}")
        other.append("note", title=f"b{index}")
    titles = [e.title for e in read_journal(run.paths).of_kind("note")]
    assert [t for t in titles if t[0] == "a"] == [f"a{i}" for i in range(20)]
    assert [t for t in titles if t[0] == "b"] == [f"b{i}" for i in range(20)]
    assert chronicle("audit").code == 0


def test_two_writers_in_two_processes_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from chronicle.journal import JournalWriter\nfrom chronicle.paths import RunPaths\n"
        "w = JournalWriter(RunPaths(Path(sys.argv[1])))\nfor i in range(50): w.append('note', title=f'{sys.argv[2]}{i}')\n"
    )
    paths = RunPaths(tmp_path / "logs" / "r")
    started = [subprocess.Popen([sys.executable, "-c", code, str(paths.run_dir), name]) for name in "xy"]
    assert [p.wait() for p in started] == [0, 0]
    journal = read_journal(paths)
    assert sorted(e.title for e in journal.entries) == sorted(f"{n}{i}" for n in "xy" for i in range(50))
    assert journal.problems == ()


def test_a_full_disk_is_one_sentence_and_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write is what a full disk gives; /dev/full is no directory, so the write itself is cut."""
    run = StoryRun(tmp_path)
    run.add("note", title="before")
    real = os.write

    def half(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2]) if data.startswith(b'{"v"') else real(fd, data)

    monkeypatch.setattr("chronicle.journal.writer.os.write", half)
    with pytest.raises(JournalError, match="cannot write to the journal"):
        run.add("note", title="lost")
    monkeypatch.setattr("chronicle.journal.writer.os.write", real)
    run.add("note", title="after")
    journal = read_journal(run.paths)
    assert [e.title for e in journal.entries] == ["before", "after"]
    assert journal.problems == ()


def test_a_full_disk_that_cannot_even_be_cut_spoils_only_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StoryRun(tmp_path)
    run.add("note", title="before")
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr("chronicle.journal.writer.os.write", lambda fd, data: real(fd, data[:9]))
        patch.setattr("chronicle.journal.writer.os.ftruncate", _refuse)
        with pytest.raises(JournalError):
            run.add("note", title="lost")
    run.add("note", title="after")
    journal = read_journal(run.paths)
    assert [e.title for e in journal.entries] == ["before", "after"]
    assert [p.check for p in journal.problems] == ["bad-line"]


def _refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_still_reads(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    run.paths.journal_dir.chmod(0o555)
    try:
        assert chronicle("status").code == 0
        done = chronicle("note", "x")
        assert done.code == 1 and "cannot write to the journal" in done.err
        one_sentence(done)
    finally:
        run.paths.journal_dir.chmod(0o755)


def test_a_journal_directory_that_is_a_file_is_one_sentence(tmp_path: Path, chronicle: Cli) -> None:
    (tmp_path / "logs" / "r").mkdir(parents=True)
    (tmp_path / "logs" / "r" / "journal").write_text("not a directory")
    done = chronicle("note", "x", "--run", "r")
    assert done.code == 1
    one_sentence(done)


def test_ctrl_c_is_code_130(tmp_path: Path, chronicle: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_run(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chronicle.cli.status.read_story", interrupt)
    done = chronicle("status")
    assert (done.code, done.err) == (130, "error: interrupted\n")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    run = toy_run(tmp_path)
    for index in range(300):
        run.add("note", title=f"note {index} " + "x" * 300)
    command = f"{sys.executable} -m chronicle.cli.main log -n 0 | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGPIPE, 128 + signal.SIGPIPE)
    assert done.stderr == ""


def test_terminal_escapes_in_notes_are_shown_not_obeyed(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    evil = "\x1b[2J\x1b]0;owned\x07 \u202egpj.exe \x9b31m\r\n"
    for kind in ("note", "incident", "hardware", "proposal", "\x1b[31mkind"):
        run.add(kind, launch=2, step=8, title=evil, data={"text": evil, "command": evil, evil: [evil]})
    run.add("checkpoint", launch=2, step=8, data={"path": evil})
    run.add("guard.verdict", launch=2, step=8, title=evil, data={"verdict": evil})
    for words in (["status"], ["log"], ["log", "--graph"], ["log", "--all"], ["render", "--no-plots"]):
        out = chronicle(*words).out
        assert not set(out) & set("\x1b\x07\x9b\r\u202e"), words
    for entry in read_journal(run.paths).entries:
        assert not set(chronicle("show", entry.id).out) & set("\x1b\x07\x9b\r\u202e")
    assert "\\x1b[2J" in chronicle("log").out


def test_markup_in_notes_is_text_in_the_rendered_page(tmp_path: Path, chronicle: Cli) -> None:
    run = toy_run(tmp_path)
    evil = '<script>alert(1)</script> ![x](javascript:alert(1)) | # h <img src=x onerror=y> `a|b`'
    evidence = [{"kind": "plot", "path": "javascript:alert(1)//.png"}, {"kind": "plot", "path": "../../etc/x.png"}]
    run.add("note", title=evil, data={"text": "# not a heading\n" + evil, "tags": [evil], "evidence": evidence})
    chronicle("render", "--no-plots")
    page = run.paths.chronicle_md.read_text()
    outside_code = "".join(page.split("`")[::2])
    assert "<script" not in outside_code and "<img" not in outside_code
    assert re.search(r"(?<!\\)\]\(javascript", outside_code) is None
    assert "etc/x.png)" not in outside_code
    assert "\n# not a heading" not in page
    row = next(line for line in page.splitlines() if "alert(1)" in line and line.startswith("| ["))
    assert len([i for i, c in enumerate(row) if c == "|" and row[i - 1] != "\\"]) == 10


def test_a_file_name_that_is_not_utf8_survives_in_the_journal(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    name = os.fsdecode(b"ckpt-\xff\xfe")
    run.add("checkpoint", launch=1, step=1, data={"path": name})
    assert read_journal(run.paths).entries[0].data["path"] == name


def test_non_finite_numbers_are_words_that_every_json_reader_takes(tmp_path: Path) -> None:
    run = StoryRun(tmp_path)
    run.add("incident", data={"peak": float("nan"), "list": [float("inf"), 1.5]})
    line = next(run.paths.journal_dir.glob("*.jsonl")).read_text()
    assert '"peak":"NaN"' in line and '["Infinity",1.5]' in line


@pytest.mark.parametrize("text", ["", "   ", "\n\n"])
def test_an_empty_note_writes_nothing(text: str, chronicle: Cli, tmp_path: Path) -> None:
    done = chronicle("note", text)
    assert done.code == 2
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("package", "words", "extra"), [
    ("yaml", ("experiment", "plan", "restart-impact"), "study"),
    ("numpy", ("data", "verify", "shards"), "train"),
])
def test_a_verb_whose_package_is_missing_names_the_extra_that_brings_it(
    chronicle: Cli, monkeypatch: pytest.MonkeyPatch, package: str, words: tuple[str, ...], extra: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name.startswith("chronicle.data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    done = chronicle(*words)
    assert done.code == 1
    assert done.err == f"error: {package} is not installed\nhint: pip install 'chronicle-ml[{extra}]'\n"
