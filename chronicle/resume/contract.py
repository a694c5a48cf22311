"""What a resumed launch must find: the manifest's memory of the checkpoint, overruled by the contract of a rollback.

`contract.json` in the run directory is written by the transaction that edited the checkpoint; the guard only reads it.
Parsing and decisions are pure; `read_contract` touches the disk.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.resume.memory import Memory

__all__ = ["Contract", "Expectation", "read_contract", "same_checkpoint"]

CONTRACT_VERSION = 1
SMALL_JUMP = 1.05
UNKNOWN_JUMP = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The promise of one rollback. LRs are those of the edited files; `next_lrs` is None where no file can tell them."""

    rollback: str
    checkpoint: str
    step: int | None = None
    optimizer_step: int | None = None
    lrs: tuple[float, ...] = ()
    initial_lrs: tuple[float | None, ...] = ()
    next_lrs: tuple[tuple[float, ...], ...] | None = None
    lr_ratio: float | None = None
    last_epochs: tuple[int, ...] = ()
    data: Mapping[str, Any] | None = None  # {"skip_batches": int, "reshuffle": bool}
    warmup_steps: int = 0
    world_size: int | None = None
    accept_change: tuple[str, ...] = ()

    @property
    def moves_data(self) -> bool:
        """Whether the rollback asked for other data than the checkpoint's own position."""
        return bool(self.data and (self.data.get("skip_batches") or self.data.get("reshuffle")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Everything known about what memory must be. `basis` says where it comes from."""

    basis: str  # contract | manifest | files | none
    memory: Memory | None = None
    contract: Contract | None = None
    accepted: Mapping[str, str] = field(default_factory=dict)  # topology key (or check name) -> reason

    def next_lrs(self) -> tuple[tuple[float, ...], ...] | None:
        """The LRs of the coming steps: the contract's, else the manifest's, scaled when only the ratio is promised."""
        stored = self.memory.next_lrs if self.memory else None
        if self.contract is None:
            return stored
        if self.contract.next_lrs is not None:
            return self.contract.next_lrs
        if self.contract.warmup_steps or self.contract.lr_ratio is None or stored is None:
            return None
        return tuple(tuple(lr * self.contract.lr_ratio for lr in row) for row in stored)

    @property
    def lr_set_by_hand(self) -> bool:
        """Whether the script itself may set the LR between load and first step: then only a jump is a mismatch."""
        if self.memory is None:
            return True
        return self.memory.lr_source == "manual" or (self.memory.lr_source == "untested" and not self.memory.schedulers)

    def allowed_jump(self) -> float:
        """By which factor a hand-set LR may differ from the last one: twice (in logarithms) what it did in a step before."""
        rows = self.memory.recent_lrs if self.memory else ()
        pairs = [(a, b) for x, y in pairwise(rows) for a, b in zip(x, y, strict=False) if a > 0 and b > 0]
        if not pairs:
            return UNKNOWN_JUMP
        return max(SMALL_JUMP, max(max(a, b) / min(a, b) for a, b in pairs) ** 2)

    def lrs(self) -> tuple[float, ...] | None:
        """LR per group that memory must hold before the first step."""
        if self.contract is not None and self.contract.lrs:
            return self.contract.lrs
        if self.memory is not None and self.memory.groups:
            ratio = 1.0 if self.contract is None else self.contract.lr_ratio
            return None if ratio is None else tuple(group.lr * ratio for group in self.memory.groups)
        return None


def read_contract(path: Path) -> Contract | None:
    """The contract of the run, None when there was no rollback; raises `ChronicleError` when it cannot be understood."""
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
        return parse_contract(record)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ChronicleError(f"contract `{path}` is damaged: {problem}", "repeat the rollback") from problem


def parse_contract(record: Mapping[str, Any]) -> Contract:
    """From the persisted form."""
    groups: Sequence[Mapping[str, Any]] = record.get("groups") or ()
    rows = record.get("next_lrs")
    epochs = [item.get("last_epoch") for item in record.get("schedulers") or ()]
    accepted = record.get("accept_change") or ()
    return Contract(
        rollback=str(record["rollback"]),
        checkpoint=str(record["checkpoint"]),
        step=record.get("step"),
        optimizer_step=record.get("optimizer_step"),
        lrs=tuple(float(group["lr"]) for group in groups),
        initial_lrs=tuple(group.get("initial_lr") for group in groups),
        next_lrs=None if not rows else tuple(tuple(float(lr) for lr in row) for row in rows),
        lr_ratio=_finite(record.get("lr_ratio")),
        last_epochs=tuple(int(epoch) for epoch in epochs if epoch is not None),
        data=record.get("data"),
        warmup_steps=int(record.get("warmup_steps") or 0),
        world_size=record.get("world_size"),
        accept_change=tuple(str(item) for item in accepted),
    )


def accepted_changes(contract: Contract | None, own: Collection[str] | Mapping[str, str]) -> dict[str, str]:
    """Changes a person accepted: those of the rollback (`--accept-change`) and those of the launch, with their reason."""
    changes = dict(own) if isinstance(own, Mapping) else dict.fromkeys(own, "accepted by the trainer")
    for item in contract.accept_change if contract else ():
        name, _, reason = item.partition(":")
        changes.setdefault(
            name.strip(), reason.strip() or f"accepted with rollback {contract.rollback if contract else ''}"
        )
    return changes


def same_checkpoint(contract: Contract, root: Path) -> bool:
    """Whether a loaded checkpoint is the contract's, whatever links lead to either."""
    promised = Path(contract.checkpoint)
    return promised.absolute() == root.absolute() or promised.resolve() == root.resolve()


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
