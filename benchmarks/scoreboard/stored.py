"""Stored small runs, and what 20 verbs say of them with `--json`: one row a verb and run.

A stored run is one JSON file of `runs/`: each file of the run with its text, or its bytes compressed. It was written by
`record.py` with the code of its day and is not written anew, so a reader that no longer understands it shows here. It is laid
at one place, because some records hold absolute paths; a lock keeps a second scoreboard away meanwhile. The clock is pinned,
each verb runs in a fork and on fresh files.
"""

import base64
import contextlib
import datetime
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

RUNS = Path(__file__).with_name("runs")
PLACE = Path(tempfile.gettempdir()) / "chronicle-scoreboard"
NOW = datetime.datetime(2026, 11, 28, 12, 0, tzinfo=datetime.UTC)
LONG_AGO = 1_700_000_000
VERB_SECONDS = 60
PACKED = "zlib:"  # before bytes that are no text: compressed, in base 64

# What differs from one machine, moment or process to another: each is replaced by its name.
CHANGING = (
    ("TOP", re.compile(re.escape(str(PLACE)) + r"/[\w-]+")),
    ("HERE", re.compile(re.escape(str(Path(__file__).parents[2])))),
    ("ID", re.compile(r"\b[0-9A-HJKMNP-TV-Z]{26}\b")),
    ("TIME", re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:\d\d)?")),
    ("WRITER", re.compile(r"\d{8}T\d{6}-[\w-]+")),
    ("PYTHON", re.compile(r"/[\w./-]*/python3?[\d.]*\b")),
    ("SIZE", re.compile(r"\d[\d.,]* ?[KMGT]i?B\b")),
)


def stored_runs() -> dict[str, dict[str, str]]:
    """Name of each stored run and its files: relative path -> text, or `zlib:` and the bytes."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))}


def pack(top: Path) -> dict[str, str]:
    """All files below a directory, as `stored_runs` gives them back; the scripts' caches are left out."""
    files = {}
    for path in sorted(top.rglob("*")):
        if not path.is_file() or path.is_symlink() or "__pycache__" in path.parts:
            continue
        content = path.read_bytes()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            text = PACKED + base64.b64encode(zlib.compress(content, 9)).decode("ascii")
        files[path.relative_to(top).as_posix()] = text
    return files


def lay(files: dict[str, str], top: Path) -> None:
    """Write a stored run at `top`; its place names these directories, so that it is the run and no copy of it."""
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    for name, text in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith(PACKED):
            path.write_bytes(zlib.decompress(base64.b64decode(text.removeprefix(PACKED))))
        else:
            path.write_text(text, encoding="utf-8")
        os.utime(path, (LONG_AGO, LONG_AGO))
    for place in top.rglob("run.json"):
        record = json.loads(place.read_text(encoding="utf-8"))
        record["inode"] = place.parent.stat().st_ino
        record["journal_inode"] = (place.parent / "journal").stat().st_ino
        place.write_text(json.dumps(record), encoding="utf-8")


def questions(top: Path) -> dict[str, list[str]]:
    """The verbs that are asked of a laid run, by the name of their row."""
    names = sorted(path.name for path in (top / "logs").iterdir() if path.is_dir())
    run, other = names[0], names[-1]
    numbers = (re.search(r"(\d+)(\.pt)?$", path.name) for path in top.glob("checkpoints/*"))
    steps = sorted(int(found[1]) for found in numbers if found)
    first, last = (steps[0], steps[-1]) if steps else (1, 2)
    journal = (top / "logs" / run / "journal").glob("*.jsonl")
    entries = [json.loads(line) for path in journal for line in path.read_text(encoding="utf-8").splitlines()]
    shown = max(entry["id"] for entry in entries)
    places = ["--run", run, "--logs", "logs"]
    both = [*places, "--checkpoints", "checkpoints"]
    logs = ["--logs", "logs"]
    return {
        "status": ["status", *both],
        "log": ["log", "--all", *places],
        "log open": ["log", "--open", *places],
        "show": ["show", shown, *places],
        "spikes": ["spikes", *both],
        "costs": ["costs", *places],
        "runs": ["runs", "--all", *logs],
        "compare": ["compare", run, other, *logs],
        "rollback": ["rollback", "--to", str(first), "--lr-scale", "0.5", "--dry-run", *both],
        "undo": ["undo", "--list", *both],
        "inspect": ["inspect", str(last), *both],
        "diff": ["diff", str(first), str(last), *both],
        "verify": ["verify", "--all", *both],
        "verify full": ["verify", "--all", "--full", *both],
        "preflight": ["preflight", *both, "--", "python", "train.py"],
        "audit": ["audit", "--full", *both],
        "ps": ["ps", *places],
        "prune": ["prune", *both],
        "export": ["export", "-f", "csv", *places],
        "latest": ["latest", "--verified", *both],
        "recover": ["recover", *both],
    }


def rows() -> tuple[dict[str, str], dict[str, str]]:
    """(row -> exit code and digest of the normalised output, digest -> that output)."""
    found: dict[str, str] = {}
    texts: dict[str, str] = {}
    pin_clock()
    PLACE.mkdir(exist_ok=True)
    with open(PLACE / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, files in stored_runs().items():
            top = PLACE / name
            lay(files, top)
            for verb, words in questions(top).items():
                lay(files, top)
                code, text = ask(as_json(words), top)
                text = normalise(text)
                digest = hashlib.sha256(text.encode()).hexdigest()[:10]
                texts[digest] = text
                found[f"{name}: {verb}"] = f"exit {code}, {digest}"
            shutil.rmtree(top)
    return found, texts


def as_json(words: Sequence[str]) -> list[str]:
    """The words with `--json` among our own; those after `--` belong to the launcher."""
    own = words.index("--") if "--" in words else len(words)
    return [*words[:own], "--json", *words[own:]]


def ask(words: Sequence[str], top: Path) -> tuple[str, str]:
    """Exit code and output of one verb in a fork that stands in `top`."""
    from chronicle.cli.main import run

    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            os.chdir(top)
            for name in [name for name in os.environ if name.startswith("CHRONICLE_")]:
                del os.environ[name]
            os.environ["NO_COLOR"] = "1"
            os._exit(answer(run, words, out.fileno()))
        code = wait(child)
        out.seek(0)
        return code, out.read().decode("utf-8", errors="replace")


def answer(run: object, words: Sequence[str], out: int) -> int:
    """In the fork: the verb's exit code; both of its streams go to the descriptor."""
    said, complained = io.StringIO(), io.StringIO()
    code = 99
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = run(list(words))  # type: ignore[operator]
    except BaseException as problem:  # noqa: BLE001 what the verb raises is its answer
        complained.write(f"{type(problem).__name__}: {problem}")
    os.write(out, f"{said.getvalue()}--- stderr\n{complained.getvalue()}".encode())
    return code


def wait(child: int) -> str:
    """How a fork ended: its code, or that it did not end in time."""
    deadline = time.monotonic() + VERB_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return f"none within {VERB_SECONDS} s"


def normalise(text: str) -> str:
    """The output without what no two machines share."""
    for name, pattern in CHANGING:
        text = pattern.sub(name, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def pin_clock() -> None:
    """Every clock of the day says `NOW`; called before chronicle is imported, which takes these names as it finds them."""
    assert "chronicle" not in sys.modules, "the clock is pinned too late"
    real = datetime.datetime

    class Pinned(real):  # type: ignore[misc,valid-type]
        """A datetime whose present is `NOW`."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Pinned":
            """The pinned moment."""
            moment: Pinned = cls.fromtimestamp(NOW.timestamp(), tz)
            return moment

    datetime.datetime = Pinned  # type: ignore[misc]
    time.time = lambda: NOW.timestamp()


def lines_that_differ(before: str, now: str) -> Iterator[str]:
    """The lines of two outputs that are not in both, with - and +."""
    import difflib

    for line in difflib.unified_diff(before.splitlines(), now.splitlines(), lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line
