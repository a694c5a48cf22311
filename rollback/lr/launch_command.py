"""The LRs that a command names: where each stands and what it becomes. Pure.

    --lr 1e-3   --optimizer.lr=1e-3   +optim.lr=1e-3     options and dotted overrides (argparse, Hydra, OmegaConf, jsonargparse)
    --override=optim.lr=1e-3                             an override inside an option
    SOLVER.BASE_LR 0.02                                  a pair of words (yacs `merge_from_list`, as Detectron2 takes them)
    --optimizer {"type":"adamw","lr":1e-3}               JSON inside a word
    LR=1e-3                                              a variable before the command

A name counts when it holds an LR (`names_lr`): not the kind of a schedule, nor its length.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollback.checkpoint.state import names_lr

_LONGEST_COMMAND = 400
_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_INSIDE = re.compile(
    r"""(?P<name>[A-Za-z_][\w\-]*)["']?\s*(?::-|[:=])\s*["']?(?P<value>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLr:
    """An LR in word `at` of a command, at `[start, end)` of it; `option` is the word before it where the two are a pair."""

    name: str
    at: int
    start: int
    end: int
    option: str = ""

    def shown(self, word: str) -> str:
        """The argument as it is typed."""
        return f"{self.option} {word}" if self.option else word


@dataclass(frozen=True, slots=True)
class Named:
    """The LRs of a command and what they become: the changes in words, the whole command after them, their names."""

    changes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    names: frozenset[str] = field(default_factory=frozenset)

    def sentence(self) -> str:
        """What to change in the command of the next launch; "" where it names no LR."""
        if not self.changes:
            return ""
        typed = shlex.join(self.after)
        whole = f": `{typed}`" if len(typed) <= _LONGEST_COMMAND and "***" not in typed else ""
        return f"in the command of the next launch, {', '.join(self.changes)}{whole}"


def lrs_named(words: Sequence[str]) -> Iterator[CommandLr]:
    """Each LR of a command, in its order."""
    for at, word in enumerate(words):
        key, equals, value = word.rpartition("=")
        name = _bare(key if equals else word)
        if equals and names_lr(name) and is_numbers(value):
            yield CommandLr(name=name, at=at, start=len(key) + 1, end=len(word))
        elif not equals and (word.startswith("-") or "." in word) and names_lr(name):
            following = words[at + 1] if at + 1 < len(words) else ""
            if is_numbers(following):
                yield CommandLr(name=name, at=at + 1, start=0, end=len(following), option=word)
        else:
            for found in _INSIDE.finditer(word) if "{" in word else ():
                if names_lr(_bare(found["name"])) and is_numbers(found["value"]):
                    yield CommandLr(name=_bare(found["name"]), at=at, start=found.start("value"), end=found.end("value"))


def changed_command(words: Sequence[str], scale: float) -> Named:
    """Every LR of a command times `scale`."""
    after, changes, names = list(words), [], set[str]()
    for lr in reversed(list(lrs_named(words))):
        changed = scaled_text(words[lr.at][lr.start : lr.end], scale)
        before = after[lr.at]
        after[lr.at] = f"{before[: lr.start]}{changed}{before[lr.end :]}"
        changes.append(f"`{lr.shown(before)}` → `{lr.shown(after[lr.at])}`")
        names.add(lr.name)
    return Named(tuple(reversed(changes)), tuple(after), frozenset(names))


def is_numbers(text: str) -> bool:
    """Whether a text is a number above 0, or a list with one such as `[0.001,0.0005]`."""
    return not re.sub(r"[\s\[\](),]", "", _NUMBER.sub("", text)) and any(float(n) > 0 for n in _NUMBER.findall(text))


def scaled_text(text: str, scale: float) -> str:
    """Every number of the text times `scale`."""
    return _NUMBER.sub(lambda found: number_words(float(found[0]) * scale), text)


def _bare(name: str) -> str:
    """The last part of an option's or a field's name: `--optim.min-lr` is `min_lr`."""
    return re.split(r"[.=]", name.lstrip("+-"))[-1].replace("-", "_")


def number_words(value: object) -> str:
    """A number as a person types it."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
