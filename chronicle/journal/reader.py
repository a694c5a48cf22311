"""Read a run's journal and check it: every writer's file, its hash chain, and the heads of other writers' chains.

A broken line becomes a `JournalProblem`; the entries around it are still read. A writer's hash chain shows changes in the
middle of its file. It does not show that the end of a file was cut off or that a whole file is missing. For that, the first
entry of each writer records the last hashes of the other writers (`heads`), launches and claims those of more writers
(`anchor_heads`), and `check_anchors` compares. A writer that closes its file notes its last line in `journal-ends`, so that the
newest file is covered too. `find_damage` is what every command asks that decides on a journal.

Limits: a writer that was killed notes nothing. Until another writer has recorded its last line, the end of its file can be cut
off unnoticed. A line cut short there cannot be told from a write that a crash cut short.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from chronicle.errors import JournalError
from chronicle.journal.entries import FIRST_PREV, Entry
from chronicle.journal.events import Claim, LaunchStart, events_of
from chronicle.journal.place import Anchors, anchors_of, names_of
from chronicle.journal.writer import end_line
from chronicle.paths import RunPaths

NEWEST_ENDS = 8  # of closed files that a screen looks at; those of earlier ones are recorded in later entries
MOST_WRITERS = 64  # of the newest, whose last lines are recorded
DIGITS = 16  # of a recorded digest
WHOLE_BYTES = 4 << 20  # a larger file is not read again for `status`
# What hides an entry or lets a wrong one in. A torn last line (`torn-line`) does not: see `find_damage`.
DAMAGE = frozenset(("bad-line", "broken-chain", "gap", "duplicate-id", "unreadable"))
DAMAGED_HINT = '`chronicle audit` lists it all; restore the file from a backup, or go on without it: --force "reason"'


class JournalProblem(NamedTuple):
    """Something wrong with a line of a journal file, or with the file."""

    # torn-line | bad-line | broken-chain | gap | duplicate-id | foreign-run | unreadable | chain-cut | empty-file | missing
    check: str
    path: Path
    line: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """All entries of a run in order, and the problems found while reading them."""

    run: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[JournalProblem, ...] = ()
    heads: tuple[tuple[str, str], ...] = ()  # (writer, sha256 of its last line)

    def of_kind(self, *kinds: str) -> Iterator[Entry]:
        """Entries of these kinds, in order."""
        return (entry for entry in self.entries if entry.kind in kinds)

    def find(self, entry_id: str) -> Entry:
        """The entry with this id or unambiguous prefix (at least 4 characters, or the whole tail); raises `JournalError`."""
        wanted = entry_id.upper()
        hits = [e for e in self.entries if e.id == wanted or e.id.startswith(wanted) or e.id.endswith(wanted)]
        if len(wanted) >= 4 and len(hits) == 1:
            return hits[0]
        if len(wanted) >= 4 and hits:
            raise JournalError(f"entry `{entry_id}` is ambiguous: " + ", ".join(e.id for e in hits[:5]))
        raise JournalError(f"no entry `{entry_id}` in run `{self.run}`", "`chronicle log` lists the ids")


def read_journal(paths: RunPaths) -> Journal:
    """Read all entries of a run. A run without a journal has an empty one; broken lines are `problems`, not errors."""
    writers: list[list[Entry]] = []
    problems: list[JournalProblem] = []
    heads: list[tuple[str, str]] = []
    names = names_of(paths)
    for path in _writer_files(paths.journal_dir, problems):
        entries, head = _read_file(path, names, problems)
        if entries:
            writers.append(entries)
            heads.append((path.stem, head))
    entries = in_order(with_paths(paths, (entry for entries in writers for entry in entries)))
    problems += _duplicates(entries, paths.journal_dir)
    return Journal(run=paths.run, entries=tuple(entries), problems=tuple(problems), heads=tuple(heads))


def with_paths(paths: RunPaths, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries with the paths that were stored relative to the run's anchors (`place`) made absolute where those are now."""
    anchors: Anchors | None = None
    for entry in entries:
        if not _has_stored_path(entry.data):
            yield entry
            continue
        anchors = anchors or anchors_of(paths)
        yield replace(entry, data=anchors.resolve(entry.data))


def _has_stored_path(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("@")
    if isinstance(value, Mapping):
        return any(_has_stored_path(item) for item in value.values())
    return isinstance(value, list) and any(_has_stored_path(item) for item in value)


def _writer_files(directory: Path, problems: list[JournalProblem]) -> list[Path]:
    """Every writer's file; a directory that cannot be listed is a problem, not an empty journal."""
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if name.endswith(".jsonl")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        problems.append(JournalProblem("unreadable", directory, 0, problem.strerror or str(problem)))
        return []


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of all writers merged by id; each writer's keep the order of its file."""
    placed: list[tuple[str, str, int, Entry]] = []
    highest: dict[str, str] = {}
    for entry in entries:
        place = highest[entry.writer] = max(entry.id, highest.get(entry.writer, ""))
        placed.append((place, entry.writer, entry.seq, entry))
    placed.sort(key=lambda item: item[:3])
    return _causal([entry for *_, entry in placed])


def _read_file(
    path: Path, names: Container[str], problems: list[JournalProblem], *, again: bool = True
) -> tuple[list[Entry], str]:
    """The entries of one file and the hash of its last line. A stale NFS handle is cured by opening the file once more."""
    before = len(problems)
    entries: list[Entry] = []
    prev, seq, broken, number = FIRST_PREV, 0, False, 0
    try:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if raw[-1:] != b"\n":
                    text = f"last line ends without a newline after {len(raw)} bytes: a write was interrupted"
                    problems.append(JournalProblem("torn-line", path, number, text))
                    break
                line, before_line = raw[:-1], prev
                prev = hashlib.sha256(line).hexdigest()
                try:
                    entry = Entry.from_json(line.decode("utf-8", "strict"))
                except (JournalError, UnicodeDecodeError) as problem:
                    problems.append(JournalProblem("bad-line", path, number, str(problem)))
                    broken = True
                    continue
                found = _chain_problems(entry, before_line, seq, broken, names)
                problems += [JournalProblem(check, path, number, text) for check, text in found]
                entries.append(entry)
                seq, broken = entry.seq + 1, False
    except OSError as problem:
        if problem.errno == errno.ESTALE and again:
            del problems[before:]
            return _read_file(path, names, problems, again=False)
        problems.append(JournalProblem("unreadable", path, number, problem.strerror or str(problem)))
    return entries, prev


def _chain_problems(
    entry: Entry, prev: str, seq: int, after_bad_line: bool, names: Container[str]
) -> Iterator[tuple[str, str]]:
    """(check, message) of each place where an entry does not fit the line before it, or the run."""
    if entry.prev != prev and not (after_bad_line and entry.seq == seq):
        yield "broken-chain", f"entry {entry.seq} has prev {entry.prev[:12]}…, but the previous line has the hash {prev[:12]}…"
    if entry.seq != seq and not after_bad_line:
        yield "gap", f"entry number is {entry.seq}: expected {seq}"
    if entry.run not in names:
        yield "foreign-run", f"entry belongs to run `{entry.run}`, but this run never had that name"


def _causal(entries: list[Entry]) -> list[Entry]:
    """Move an entry behind all entries of this journal that it refers to."""
    position = {entry.id: index for index, entry in enumerate(entries)}
    late = [i for i, e in enumerate(entries) if any(position.get(ref, -1) > i for ref in e.refs)]
    if not late:
        return entries
    out: list[Entry] = []
    done: set[str] = set()
    waiting: list[Entry] = []
    for entry in entries:
        waiting.append(entry)
        progress = True
        while progress:
            progress = False
            blocked_writers: set[str] = set()
            for candidate in list(waiting):
                ready = all(ref in done or ref not in position for ref in candidate.refs)
                if ready and candidate.writer not in blocked_writers:
                    waiting.remove(candidate)
                    out.append(candidate)
                    done.add(candidate.id)
                    progress = True
                else:
                    blocked_writers.add(candidate.writer)
    return out + waiting  # references in a circle: keep them, in time order


def _duplicates(entries: Iterable[Entry], directory: Path) -> Iterator[JournalProblem]:
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            text = f"entry id {entry.id} occurs twice"
            path = directory / f"{entry.writer}.jsonl"
            yield JournalProblem("duplicate-id", path, entry.seq + 1, text)
        seen.add(entry.id)


# --- last lines of other writers ---------------------------------------------------------------------------------------


def anchor_heads(journal: Journal) -> dict[str, str]:
    """Writer -> first digits of the hash of its last line, for the newest writers (names begin with a time stamp)."""
    newest = sorted(journal.heads)[-MOST_WRITERS:]
    return {writer: digest[:DIGITS] for writer, digest in newest}


def check_anchors(paths: RunPaths, journal: Journal, *, quick: bool = False) -> Iterator[JournalProblem]:
    """A problem for every recorded last line that its writer's file does not hold any more.

    `quick` looks only whether files larger than `WHOLE_BYTES` are there.
    """
    known: dict[str, set[str]] = {}
    for entry in journal.entries:
        known.setdefault(entry.writer, set()).add(entry.prev[:DIGITS])
    for writer, digest in journal.heads:
        known.setdefault(writer, set()).add(digest[:DIGITS])
    recorded = _recorded_heads(journal)
    for writer, digest in _recorded_ends(paths, most=NEWEST_ENDS if quick else None):
        recorded.setdefault(writer, {}).setdefault(digest, f"`{paths.ends_path.name}`")
    for writer, expected in recorded.items():
        if expected.keys() <= known.get(writer, set()):
            continue
        path = paths.journal_dir / f"{writer}.jsonl"
        try:
            if quick and path.stat().st_size > WHOLE_BYTES:
                continue
            lines = path.read_bytes().split(b"\n")  # again: the listing of a network filesystem may be old
        except OSError as problem:
            gone = isinstance(problem, FileNotFoundError)
            text = "the file is missing" if gone else problem.strerror or str(problem)
            text = f"{text}; {next(iter(expected.values()))} recorded it"
            yield JournalProblem("chain-cut", path, 0, text)
            continue
        found = {hashlib.sha256(line).hexdigest()[:DIGITS] for line in lines}
        for digest, recorder in expected.items():
            if digest not in found:
                text = f"the line that {recorder} recorded as the last one was changed or removed"
                yield JournalProblem("chain-cut", path, 0, text)


def _recorded_heads(journal: Journal) -> dict[str, dict[str, str]]:
    """Writer -> digest of a last line -> the entry that recorded it, in words."""
    recorded = [(entry, entry.heads) for entry in journal.entries if entry.heads]
    recorded += [(entry, start.journal_heads) for entry, start in events_of(journal.entries, LaunchStart)]
    recorded += [(entry, claim.journal_heads) for entry, claim in events_of(journal.entries, Claim)]
    anchors: dict[str, dict[str, str]] = {}
    for entry, heads in recorded:
        for writer, digest in heads.items():
            anchors.setdefault(str(writer), {}).setdefault(str(digest), f"entry {entry.id}")
    return anchors


def _recorded_ends(paths: RunPaths, most: int | None) -> Iterator[tuple[str, str]]:
    """(writer, digest of its last line) as writers noted them when they closed their files; of the newest `most`."""
    try:
        lines = paths.ends_path.read_text(encoding="ascii", errors="replace").splitlines(keepends=True)
    except OSError:
        return
    for line in lines if most is None else lines[-most:]:
        words = line.split()
        if len(words) == 3 and line == end_line(words[0], words[1]):
            yield words[0], words[1]


# --- damage ------------------------------------------------------------------------------------------------------------


def find_damage(paths: RunPaths, journal: Journal, *, quick: bool = False) -> tuple[JournalProblem, ...]:
    """What forbids a decision on this journal: lines that cannot be read, cut chains, files cut, emptied or deleted.

    A last line that a crash cut short is no damage. An entry is on disk before its writer acts on it: so nothing was done
    after an intent whose line is torn, and a receipt whose line is torn leaves its intent open, which `recover` repeats.
    `quick` is for a screen: of large files it is only checked that they are there.
    """
    found = [problem for problem in journal.problems if problem.check in DAMAGE]
    found += check_anchors(paths, journal, quick=quick)
    said = {problem.path for problem in found}
    for path in _writer_files(paths.journal_dir, []):
        if path not in said and _is_empty(path):
            text = "the file is empty: a journal file gets its name with its first entry, so it was emptied"
            found.append(JournalProblem("empty-file", path, 0, text))
    if not journal.entries and not found and _was_written(paths):
        text = "no entry is left, although `run.json` and logged steps show that the run was recorded"
        found.append(JournalProblem("missing", paths.journal_dir, 0, text))
    return tuple(found)


def _is_empty(path: Path) -> bool:
    try:
        return path.stat().st_size == 0
    except OSError:
        return False  # it is named as unreadable already


def _was_written(paths: RunPaths) -> bool:
    logged = paths.launches_dir.glob("*/metrics.jsonl")
    return (paths.run_dir / "run.json").is_file() and any(True for _ in logged)


def damage_overridden(paths: RunPaths, journal: Journal) -> tuple[str, ...]:
    """Each damage as `file line: what`, for the entry of whoever goes on in spite of it."""
    return tuple(f"{_where(paths, problem)}: {problem.check}: {problem.message}" for problem in find_damage(paths, journal))


def _where(paths: RunPaths, problem: JournalProblem) -> str:
    return problem.path.relative_to(paths.run_dir).as_posix() + (f" line {problem.line}" if problem.line else "")


def describe_damage(paths: RunPaths, damage: Sequence[JournalProblem]) -> str:
    """One sentence: the first place with what is wrong there, and how many more there are."""
    first = damage[0]
    more = f"; and {len(damage) - 1} more" if len(damage) > 1 else ""
    what = ("cannot be read: " if first.check == "unreadable" else "") + first.message
    return f"the journal of run `{paths.run}` is damaged: `{_where(paths, first)}`: {what}{more}"
