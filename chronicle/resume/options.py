"""What a launch tells the guard about itself: arguments of the trainer, overruled by the environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from chronicle.errors import SettingsError
from chronicle.resume.contract import parse_change

__all__ = ["Mode", "Options", "effective_options", "launch_number", "requested_ranks"]


class Mode(StrEnum):
    """What a mismatch does: `CHRONICLE_GUARD`. Everything but `enforce` is for emergencies, and journalled."""

    ENFORCE = "enforce"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Callables are asked when the value is needed."""

    run_dir: str | Path | None = None  # a directory, or the bare name of a run
    data_state: Callable[[], Any] | None = None  # position of the data of the next optimizer step, JSON-able
    step: Callable[[], int | None] | None = None  # optimizer steps completed
    same_data: bool = False  # the trainer promises that a resume goes on with exactly the next batch
    honours: tuple[str, ...] = ()  # of a rollback's contract, what the trainer carries out: warmup, skip, reshuffle
    fresh_start: bool = False
    accept_change: Mapping[str, str] = field(default_factory=dict)  # topology key -> reason
    mode: Mode = Mode.ENFORCE


def effective_options(options: Options, environ: Mapping[str, str]) -> Options:
    """The options with `CHRONICLE_GUARD`, `CHRONICLE_FRESH_START` and `CHRONICLE_ACCEPT_CHANGE` applied.

    `CHRONICLE_ACCEPT_CHANGE` is `key: reason; key: reason`, or one reason for every difference of topology and data.
    Raises `SettingsError` on a word that means nothing.
    """
    changes = dict(options.accept_change)
    for item in environ.get("CHRONICLE_ACCEPT_CHANGE", "").split(";"):
        if item.strip():
            name, reason = parse_change(item)
            changes[name] = reason
    fresh = options.fresh_start or environ.get("CHRONICLE_FRESH_START", "") not in ("", "0")
    return replace(options, mode=_mode(options.mode, environ), fresh_start=fresh, accept_change=changes)


def launch_number(environ: Mapping[str, str]) -> int | None:
    """The launch this process belongs to; None when it was not started by `chronicle run`."""
    text = environ.get("CHRONICLE_LAUNCH", "")
    return int(text) if text.isdecimal() else None


def requested_ranks(environ: Mapping[str, str]) -> int | None:
    """How many ranks `chronicle run`'s launcher was asked for; None where its words leave that open."""
    text = environ.get("CHRONICLE_REQUESTED_RANKS", "")
    return int(text) if text.isdecimal() else None


def _mode(given: Mode, environ: Mapping[str, str]) -> Mode:
    text = environ.get("CHRONICLE_GUARD", "").strip().lower()
    if text in ("", "on", "1"):
        return given
    try:
        return Mode(text)
    except ValueError:
        raise SettingsError(
            f"CHRONICLE_GUARD is `{text}`: expected `enforce`, `warn` or `off`", "unset it to enforce"
        ) from None
