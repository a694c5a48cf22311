"""A script's own note of its newest checkpoint (`ck/newest` holds "step-40", or "40"), in the view of a replay.

A replay hides what was saved later, and such a note would lead the script there. So it says, in the same form, the checkpoint
to begin with; the real file is not touched. This is done only where it is certain what the note says: all of its text, or of a
JSON object every value, is the name, the path or the number of the newest checkpoint that is hidden, and of no other one. What
else speaks of it is left as it is, and said.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicle.checkpoints import KnownStates
from chronicle.replay.places import identity_of
from rollback.checkpoint.layout import Checkpoint, saved_number

MOST_BYTES, MOST_FILES, SHOWN = 4096, 1000, 60
Saved = tuple[Checkpoint, int | None]  # and its step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What a note may speak of."""

    root: Path
    cwd: Path
    hidden: Sequence[Saved]  # the newest is the last
    there: Sequence[Saved]  # what is not hidden, beside the one to begin with
    kept: Saved


def rewrite_notes(
    root: Path,
    cwd: Path,
    listed: Sequence[Checkpoint],
    gone: set[str],
    kept: Checkpoint,
    start: int,
    states: KnownStates,
) -> list[str]:
    """Let the notes in `root` name `kept`, of step `start`, before what is in `gone` is removed; what was done, in words."""
    found = [(path, text) for path, text in _texts(root, gone) if _speaks(text)]
    if not found or not gone:
        return []
    steps = [(one, identity_of(one, states).get("step", one.step)) for one in listed if one.path.name != kept.path.name]
    later = ((one, step) for one, step in steps if one.path.name in gone)
    hidden = sorted(later, key=lambda row: (row[1] or 0, row[0].path.name))
    if not hidden:
        return []
    there = [(one, step) for one, step in steps if one.path.name not in gone]
    around = _Around(root=root, cwd=cwd, hidden=hidden, there=there, kept=(kept, start))
    since = os.stat(kept.path).st_mtime
    said = []
    for path, text in found:
        word = text.strip()
        after = _of_json(word, around, path, since) if word.startswith("{") else _of_word(word, around, path, since)
        if after:
            path.write_text(text.replace(word, after), encoding="utf-8")
            said.append(f"`{path}` says {_short(word)}, which was saved later: in the replay it says {_short(after)}")
        elif after is None or re.search(rf"(?<![\w.-]){re.escape(hidden[-1][0].path.name)}(?![\w-])", word):
            said.append(f"`{path}` ({_short(word)}) may name a checkpoint that was saved later: it was left as it is")
    return said


def _of_word(word: str, around: _Around, path: Path, since: float) -> str | None:
    """What a note with this text says in the replay; "" where it names nothing hidden, None where that is not certain."""
    newest = around.hidden[-1]
    meant = {(saved is newest, after) for saved in around.hidden for after in _forms(word, saved, around)}
    if not meant:
        return ""
    if len(meant) > 1 or any(True for saved in (*around.there, around.kept) for _ in _forms(word, saved, around)):
        return None
    is_newest, after = meant.pop()
    is_older = word.isdecimal() and os.stat(path).st_mtime < since  # then it speaks of something else
    return after if is_newest and after and not is_older else None


def _of_json(text: str, around: _Around, path: Path, since: float) -> str | None:
    """The same of a JSON object: every value of it is one that changes, else the others would not fit any more."""
    try:
        values: Mapping[str, Any] = json.loads(text)
    except ValueError:
        return ""
    words = {name: str(value) for name, value in values.items() if isinstance(value, str | int) and not isinstance(value, bool)}
    after = {name: _of_word(word, around, path, since) for name, word in words.items()}
    if not any(one != "" for one in after.values()):
        return ""
    if len(after) < len(values) or not all(after.values()):
        return None
    return json.dumps({name: type(values[name])(one) for name, one in after.items()})


def _forms(word: str, saved: Saved, around: _Around) -> Iterator[str]:
    """For every way in which this text means this checkpoint, what means the one to begin with; "" where nothing does."""
    (one, step), (kept, start) = saved, around.kept
    if word == one.path.name:
        yield kept.path.name
    elif one.single_file and word == one.path.stem:
        yield kept.path.stem if kept.single_file else ""
    elif os.sep in word:
        for base in dict.fromkeys((around.cwd, around.root, around.root.parent)):
            place = Path(os.path.normpath(base / word))
            if one.path in (place, *place.parents):
                rest = place.relative_to(one.path)
                once = word.count(one.path.name) == 1 and (kept.path / rest).exists()
                yield word.replace(one.path.name, kept.path.name) if once else ""
                return
    elif word.isdecimal() and word.isascii():
        if int(word) == _number(one):
            number = _number(kept)
            yield "" if number is None else f"{number:0{len(word)}d}" if word.startswith("0") else str(number)
        if int(word) == step:
            yield f"{start:0{len(word)}d}" if word.startswith("0") else str(start)


def _number(one: Checkpoint) -> int | None:
    """The last number in its name."""
    if one.single_file and (found := saved_number(one.path.name)) is not None:
        return found
    numbers = re.findall(r"\d+", one.path.stem if one.single_file else one.path.name)
    return int(numbers[-1]) if numbers else None


def _texts(root: Path, gone: set[str]) -> Iterator[tuple[Path, str]]:
    """Small files directly in `root`, as text."""
    try:
        listed = [entry for entry in os.scandir(root) if entry.is_file(follow_symlinks=False) and entry.name not in gone]
    except OSError:
        return
    for entry in sorted(listed, key=lambda entry: entry.name)[:MOST_FILES]:
        try:
            with open(entry.path, "rb") as file:
                content = file.read(MOST_BYTES + 1)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if len(content) <= MOST_BYTES:
            yield Path(entry.path), text


def _speaks(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


def _short(word: str) -> str:
    return repr(word if len(word) <= SHOWN else word[:SHOWN] + "…")
