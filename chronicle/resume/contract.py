"""What a resumed launch must have in memory: the manifest, overridden by a rollback's contract and accepted changes.

`contract.json` in the run directory is written by the transaction that edited the checkpoint; the guard only reads it.
`Options` are this launch's own arguments and environment variables. `load_contract` is the one function
here that touches the disk.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, TypedDict

from chronicle.errors import ChronicleError, SettingsError, UsageProblem
from chronicle.journal.place import anchors_of, is_same_directory
from chronicle.paths import RunPaths
from chronicle.resume.memory import LrRow, Memory, read_fields
from chronicle.settings import is_url

CONTRACT_VERSION = 1
COMPUTED = 1e-6  # relative tolerance: a contract's LRs come from a closed form, torch's from its recursion
EVERYTHING = "*"  # a reason without a name accepts every difference of topology and data plan …
NEVER_BY_REASON_ALONE = frozenset(  # … but these must be named
    {"lr", "schedule", "rng", "weight_decay", "initial_lr", "max_lr", "min_lr", "checkpoint", "frozen_parameters"}
)
NAME = re.compile(r"[a-z][a-z0-9_]*")
SMALL_JUMP = 1.05
NUM_LAST = 5  # steps whose LRs say how far the next one may be
UNKNOWN_JUMP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The promise of one rollback. LRs are those of the edited files; `next_lrs` is None where no file contains them."""

    rollback: str
    checkpoint: str
    step: int | None = None
    optimizer_step: int | None = None
    lrs: tuple[float, ...] = ()
    next_lrs: tuple[tuple[float, ...], ...] | None = None
    lr_ratio: float | None = None
    lr_unproved: tuple[str, ...] = ()  # what may set another LR than the checkpoint's; it is held then
    last_epochs: tuple[int, ...] = ()
    data: Mapping[str, Any] | None = None  # {"skip_batches": int, "reshuffle": bool}
    warmup_steps: int = 0
    accept_change: tuple[str, ...] = ()
    identity: str = ""  # of the checkpoint, as it carries it: beats its path

    @property
    def moves_data(self) -> bool:
        """Whether the rollback asked for other data than the checkpoint's own position."""
        return bool(self.data and (self.data.get("skip_batches") or self.data.get("reshuffle")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What memory must hold. `basis` says where that comes from."""

    basis: str  # contract | manifest | none
    memory: Memory | None = None
    contract: Contract | None = None
    accepted: Mapping[str, str] = field(default_factory=dict)  # topology key (or check name) -> reason
    by_script: tuple[str, ...] = ()  # options of the contract that the script applies itself

    def accepts(self, name: str) -> bool:
        """Whether a person accepted that this differs: by its own name, or by a reason for all of the topology."""
        return name in self.accepted or (EVERYTHING in self.accepted and name not in NEVER_BY_REASON_ALONE)

    @property
    def warms_up(self) -> bool:
        """Whether the script itself sets lower LRs, because the rollback asked for a warm-up."""
        return self.contract is not None and self.contract.warmup_steps > 0 and "warmup" in self.by_script

    def next_lrs(self) -> tuple[LrRow, ...] | None:
        """The LRs of the coming steps: the contract's, else those of the manifest if they begin with the promised LR."""
        stored = self.memory.next_lrs if self.memory else None
        if self.contract is None:
            return stored
        if self.contract.next_lrs is not None:
            return self.contract.next_lrs
        ratio = self.contract.lr_ratio
        # a manifest that the rollback rewrote holds the new LRs already, one that it did not touch holds the old ones
        for factor in (1.0, ratio) if ratio is not None else (1.0,):
            rows = None if stored is None else tuple(tuple(lr and lr * factor for lr in row) for row in stored)
            if rows and self.contract.lrs and close_rows(rows[:1], (self.contract.lrs,), COMPUTED):
                return rows
        return None

    @property
    def lr_set_by_hand(self) -> bool:
        """Whether the script may set the LR itself between load and first step: then only a jump is a mismatch."""
        if self.contract is not None and self.contract.lr_unproved:
            return True
        if self.memory is None:
            return True
        return self.memory.lr_source == "manual" or (self.memory.lr_source == "untested" and not self.memory.schedulers)

    def allowed_jump(self) -> float:
        """The factor by which a hand-set LR may differ from the last one: its largest recent change squared.

        After an edit that was accepted without proof it is nearer to the new LR than to the old one.
        """
        rows = self.memory.recent_lrs[-NUM_LAST if self.contract is None else 0 :] if self.memory else ()
        changes = [pair for x, y in pairwise(rows) for pair in zip(x, y, strict=False)]
        pairs = [(a, b) for a, b in changes if a is not None and b is not None and a > 0 and b > 0]
        usual = max(SMALL_JUMP, max(max(a, b) / min(a, b) for a, b in pairs) ** 2) if pairs else UNKNOWN_JUMP
        ratio = self.contract.lr_ratio if self.contract is not None and self.contract.lr_unproved else None
        return usual if ratio is None or ratio <= 0 else min(usual, math.sqrt(max(ratio, 1 / ratio)))

    def lrs(self) -> LrRow | None:
        """LR per group that memory must hold before the first step."""
        if self.contract is not None and self.contract.lrs:
            return self.contract.lrs
        if self.memory is not None and self.memory.groups:
            return tuple(group.lr for group in self.memory.groups)
        return None


def load_contract(path: Path) -> Contract | None:
    """The contract of the run, None when there was no rollback. Raises `ChronicleError` when it cannot be understood."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise ChronicleError(f"cannot read the contract `{path}`: {problem.strerror}") from problem
    try:
        record = json.loads(text)
        if record.get("v") != CONTRACT_VERSION:
            raise ChronicleError(
                f"contract `{path}` has version {record.get('v')!r}: this program reads version {CONTRACT_VERSION}",
                "use the `chronicle` that made the rollback, or a newer one",
            )
        stored = anchors_of(RunPaths(path.parent)).resolve(record.get("stored") or record["checkpoint"])
        return _parse_contract(record | {"checkpoint": stored})
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ChronicleError(f"contract `{path}` is damaged: {problem}", "repeat the rollback") from problem


def _parse_contract(record: Mapping[str, Any]) -> Contract:
    known = {name: value for name, value in record.items() if value not in (None, [])}
    known["rollback"] = record["rollback"]
    groups: Sequence[Mapping[str, Any]] = record.get("groups") or ()
    epochs = [item.get("last_epoch") for item in record.get("schedulers") or ()]
    known["lrs"] = [group["lr"] for group in groups]
    known["last_epochs"] = [epoch for epoch in epochs if epoch is not None]
    known["lr_ratio"] = _finite(record.get("lr_ratio"))
    return Contract(**read_fields(Contract, known))


def accepted_changes(contract: Contract | None, own: Mapping[str, str]) -> dict[str, str]:
    """Changes a person accepted: those of the launch, and those of the rollback (`--accept-change "name: reason"`)."""
    changes = dict(own)
    for text in contract.accept_change if contract else ():
        name, reason = parse_change(text)
        changes.setdefault(name, reason)
    return changes


def parse_change(text: str) -> tuple[str, str]:
    """Split `name: reason`; a sentence without a name is a reason for everything."""
    name, colon, reason = (part.strip() for part in text.partition(":"))
    if NAME.fullmatch(name) and (colon or "_" in name):
        return name, reason or "no reason given"
    return EVERYTHING, text.strip()


def is_close(a: float | None, b: float | None, tolerance: float) -> bool:
    """Whether two numbers are equal within a relative tolerance of the smaller one; None (no number) equals None."""
    if a is None or b is None:
        return a is b
    return a == b or abs(a - b) <= tolerance * min(abs(a), abs(b))


def close_rows(a: Sequence[Sequence[float | None]], b: Sequence[Sequence[float | None]], tolerance: float) -> bool:
    """Whether two tables have the same shape and every number is close."""
    return len(a) == len(b) and all(
        len(x) == len(y) and all(is_close(p, q, tolerance) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


def same_checkpoint(contract: Contract, root: Path, memory: Memory | None) -> bool:
    """Whether a loaded checkpoint is the contract's: by the identity that it carries, else by its place."""
    carried = "" if memory is None else memory.state_id
    if is_url(contract.checkpoint) and PurePath(contract.checkpoint).name in (root.name, root.parent.name):
        return True  # a copy of what lies in the store; the name holds the id of the rollback
    return bool(carried and carried == contract.identity) or is_same_directory(contract.checkpoint, root)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


# ---- options of this launch: arguments of the trainer, overruled by the environment ----------------------------------


class Mode(StrEnum):
    """What a mismatch does: `CHRONICLE_GUARD`. `warn` and `off` are for emergencies, and recorded in the journal."""

    ENFORCE = "enforce"
    WARN = "warn"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of `guard`, `attach` and the callbacks. Callables are called when the value is needed."""

    run_dir: str | Path | None = None  # a directory, or the bare name of a run
    data_state: Callable[[], Any] | None = None  # position of the data of the next optimizer step, JSON-able
    step: Callable[[], int | None] | None = None  # optimizer steps completed
    same_data: bool = False  # the trainer promises that a resume continues with exactly the next batch
    honours: Sequence[str] = ()  # options of a rollback that the trainer applies itself: warmup, skip, reshuffle
    fresh_start: bool = False  # this launch intends to start from scratch although the run has checkpoints
    accept_change: Mapping[str, str] = field(default_factory=dict)  # topology key -> reason
    averages: Mapping[str, Any] = field(default_factory=dict)  # name -> averaged copy of the model (EMA)
    objects: Mapping[str, Any] = field(default_factory=dict)  # name -> the script's own object with a `state_dict`
    mode: Mode = Mode.ENFORCE
    tokenizer: Any = None  # of the script: the first batch is decoded with it
    check_steps: int = 0  # every how many steps one is taken twice; 0: none


class Said(TypedDict, total=False):
    """What a script can say to `guard`, `attach` and the callbacks, by name; `Options` says what each means."""

    data_state: Callable[[], Any] | None
    step: Callable[[], int | None] | None
    same_data: bool
    honours: Sequence[str]
    fresh_start: bool
    accept_change: Mapping[str, str] | None
    averages: Mapping[str, Any] | None
    objects: Mapping[str, Any] | None
    mode: str  # enforce, warn, off
    tokenizer: Any
    check_steps: int


def options_from(run_dir: str | Path | None, said: Said) -> Options:
    """Options as a script said them; raises `TypeError` for a name that there is not, `UsageProblem` for an unknown mode."""
    known: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    mode = parse_mode(known.pop("mode", "enforce"))
    return Options(run_dir=run_dir, mode=mode, **known)


def effective_options(options: Options, environ: Mapping[str, str]) -> Options:
    """The options with `CHRONICLE_GUARD`, `CHRONICLE_FRESH_START`, `CHRONICLE_ACCEPT_CHANGE`, `CHRONICLE_CHECK_STEPS` applied.

    `CHRONICLE_ACCEPT_CHANGE` is `key: reason; key: reason`, or one reason for every difference of topology and data.
    Raises `SettingsError` for an unknown mode, and for what is no number of steps.
    """
    changes = dict(options.accept_change)
    for item in environ.get("CHRONICLE_ACCEPT_CHANGE", "").split(";"):
        if item.strip():
            name, reason = parse_change(item)
            changes[name] = reason
    fresh = options.fresh_start or environ.get("CHRONICLE_FRESH_START", "") not in ("", "0")
    every = _check_steps(options.check_steps, environ)
    mode = _mode(options.mode, environ)
    return replace(options, mode=mode, fresh_start=fresh, accept_change=changes, check_steps=every)


def launch_number(environ: Mapping[str, str]) -> int | None:
    """The launch this process belongs to; None when it was not started by `chronicle run`."""
    text = environ.get("CHRONICLE_LAUNCH", "")
    return int(text) if text.isdecimal() else None


def wants_batch_text(environ: Mapping[str, str]) -> bool:
    """Whether text of the first batch may be written to the journal: `CHRONICLE_BATCH_TEXT`, set from `batch_text`."""
    return environ.get("CHRONICLE_BATCH_TEXT", "").strip().lower() not in ("0", "false", "no", "off")


def requested_ranks(environ: Mapping[str, str]) -> int | None:
    """How many ranks the launcher of `chronicle run` was asked for; None where its arguments leave that open."""
    text = environ.get("CHRONICLE_REQUESTED_RANKS", "")
    return int(text) if text.isdecimal() else None


def parse_mode(text: str) -> Mode:
    """The mode that `guard` or `attach` was given; raises `UsageProblem` for another word."""
    try:
        return Mode(text)
    except ValueError:
        raise UsageProblem(f"mode is `{text}`: expected `enforce`, `warn` or `off`") from None


def _check_steps(given: Any, environ: Mapping[str, str]) -> int:
    text = environ.get("CHRONICLE_CHECK_STEPS", "").strip() or str(given)
    if not text.isdecimal():
        raise SettingsError(f"check_steps is `{text}`: expected a number of steps (`CHRONICLE_CHECK_STEPS`)", "0 checks none")
    return int(text)


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
