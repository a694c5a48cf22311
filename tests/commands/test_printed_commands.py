"""Every command that a verb prints about a run is one that runs: collected over the stored runs, and run dry."""

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.scoreboard.stored import lay, questions, stored_runs
from chronicle.cli.main import run as chronicle

PRINTED = re.compile(r"`(chronicle [^`\n]+)`")
TO_FILL_IN = re.compile(r"…|\.\.\.|<\S|\bDIR\b|\bNAME\b|\bID\b|\bFILE\b|\bN\b|\|")
CHANGES = {"rollback": "--dry-run", "prune": "--dry-run"}  # verbs that ask before they change anything, and how to look only
LEFT_OUT = ("run", "serve", "watch", "replay", "rehearse", "mcp")  # they start a trainer or do not end
RAN = (0, 5)  # done, or done with findings
RUNS = stored_runs()


def printed_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The commands in what one verb says, but for those with something to fill in."""
    capsys.readouterr()
    chronicle(words)
    said = capsys.readouterr()
    text = (said.out + said.err).replace("\u2007", " ")
    return {one for one in PRINTED.findall(text) if TO_FILL_IN.search(one) is None}


def dry(command: str) -> list[str] | None:
    """The words of a printed command in a form that changes nothing; None where it cannot be tried."""
    words = shlex.split(command)[1:]
    if words[0] in LEFT_OUT or "--help" in words:
        return None
    more = CHANGES.get(words[0])
    return [*words, more] if more is not None and more not in words else words


@pytest.mark.parametrize("name", RUNS)
def test_every_printed_command_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command that `status` named after a rollback was refused: "step 100 exists 2 times"."""
    for variable in ("CHRONICLE_RUN", "CHRONICLE_LOGS", "CHRONICLE_CHECKPOINTS", "CHRONICLE_RUN_DIR"):
        monkeypatch.delenv(variable, raising=False)
    top = tmp_path / name
    lay(RUNS[name], top)
    monkeypatch.chdir(top)
    asked = questions(top)
    own = sorted(path.name for path in (top / "logs").iterdir() if path.is_dir())[0]
    monkeypatch.setenv("CHRONICLE_RUN", own)
    commands: set[str] = set()
    for verb in ("status", "log", "log open", "spikes", "runs", "costs", "verify", "rollback", "undo", "prune", "latest"):
        lay(RUNS[name], top)
        commands |= printed_by(asked[verb], capsys)
    failed = []
    for command in sorted(commands):
        words = dry(command)
        if words is None:
            continue
        lay(RUNS[name], top)
        capsys.readouterr()
        code = chronicle(words)
        if code not in RAN:
            failed.append(f"{command}: code {code}, {capsys.readouterr().err.strip()[:200]}")
    assert failed == []
