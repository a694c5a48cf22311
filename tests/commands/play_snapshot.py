"""What every verb prints about a stored run: `python -m tests.commands.play_snapshot RUN`, or `--write` for all of them.

The text is what a person reads, without what differs from one machine or moment to another. A process of its own pins the
clock before chronicle is imported.
"""

import fcntl
import re
import shutil
import socket
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.scoreboard.stored import PLACE, ask, lay, normalise, pin_clock, questions, stored_runs

SNAPSHOTS = Path(__file__).with_name("snapshots")
MOST_LINES = 60  # of one output
ID = re.compile(r"\b(?=\d*[A-Z])(?:[0-9A-HJKMNP-TV-Z]{18})?[0-9A-HJKMNP-TV-Z]{8}\b")
RUNS = ("rolled_back", "diverging", "nan_folders", "refused", "toy")


def more_questions(run: str) -> dict[str, list[str]]:
    """Verbs that the scoreboard does not ask, and other forms of some that it asks."""
    places = ["--run", run, "--logs", "logs"]
    both = [*places, "--checkpoints", "checkpoints"]
    return {
        "log newest": ["log", "-n", "5", *places],
        "log graph": ["log", "--graph", *places],
        "list of checkpoints": ["inspect", *both],
        "settings": ["settings", *places],
        "settings of two": ["settings", "@1", "@2", *places],
        "settings changed": ["settings", "--diff", *places],
        "compare launches": ["compare", f"{run}@1", f"{run}@2", "--logs", "logs"],
        "runs where": ["runs", "--where", "loss < 100 and settings.none == 1", "--logs", "logs"],
        "watch once": ["watch", run, "--once", "--logs", "logs", "--checkpoints", "checkpoints"],
        "latest path": ["verify", "--newest", "--print-path", *both],
        "rollback without a step": ["rollback", *both],
        "close": ["note", "--close", "open", "--outcome", "worked", "it was the data", *places],
        "note": ["note", "node 7 is slow", "--suspect", "node: it is hot", "--did", "lr: 1 -> 2", "--incident", *places],
        "config": ["config", "show", *both],
        "hardware": ["hardware", "--exclude", "node-7", "--reason", "Xid 64", *places],
        "tag": ["runs", run, "--add-tag", "baseline", "--logs", "logs"],
        "claim": ["claim", "--steps", "20", "--devices", "4", "trained on 4 GPUs", *places],
        "markdown": ["report", "--markdown", "--check", *places],
        "init": ["init", *both],
        "alerts": ["alerts", *places],
        "data": ["data", "usage", *places],
        "no such option": ["status", "--no-such", *both],
        "no such run": ["status", "--run", "nobody", "--logs", "logs"],
    }


def play(name: str) -> str:
    """The questions, each with its exit code and what it prints."""
    parts = []
    PLACE.mkdir(exist_ok=True)
    with open(PLACE / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        files, top = stored_runs()[name], PLACE / name
        known = "\n".join(files.values())
        lay(files, top)
        asked = questions(top)
        run = asked["status"][asked["status"].index("--run") + 1]
        for words in (asked | more_questions(run)).values():
            lay(files, top)
            code, text = ask(words, top)
            parts.append(f"$ chronicle {' '.join(words)}\n{shown(text, known)}\n[{code}]\n")
        shutil.rmtree(top)
    return "\n".join(parts)


def shown(text: str, known: str) -> str:
    """An output as it is kept: ids that were written just now, and this machine's name, are replaced; the rest is cut."""
    text = ID.sub(lambda found: found[0] if found[0] in known else "NEW_ID", text)
    lines = normalise(re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)).rstrip().splitlines()
    more = len(lines) - MOST_LINES
    return "\n".join(lines if more <= 0 else [*lines[:MOST_LINES], f"… {more} more lines"])


def load_verbs() -> None:
    """Import every verb once, so that each question's fork begins with them."""
    from chronicle.cli.main import VERBS

    for target in VERBS.values():
        import_module(target.partition(":")[0])


if __name__ == "__main__":
    pin_clock()
    load_verbs()
    for one in RUNS if sys.argv[1:] == ["--write"] else ():
        SNAPSHOTS.joinpath(f"{one}.txt").write_text(play(one), encoding="utf-8")
    for one in sys.argv[1:]:
        if one != "--write":
            print(play(one), end="")
