"""What the first pass itself changed between a save and its next optimizer step, and so may be changed after a resume of it.

A save is not always the state in which the next step is taken. A script frees its frozen layers at the third epoch, adds a
parameter group, sets the LR of the next step by hand, steps a scheduler, swaps the dataset of a curriculum. A resume does the
same after its load, and then memory right before its first step is not what was saved, although nothing is wrong. The right
thing to compare with is what the first pass had right before *its* next step. So a launch that goes on after a save describes
memory once more, right before that step, without the digests of moments. `<run>/sequels/<state>.<rank>` keeps the description
if it differs from the save in anything that a resume is refused for, and else only says that it does not. Weights are among
it: some scripts move a momentum encoder, or normalise their embeddings, before they call the model.

A resume that differs from its save and is as that description says is noted. Where the launch ended right at its save there is
no such file. Then a difference is noted only if this training changed the same thing between an earlier save and its next step
(`habits`, which every checkpoint carries); learning rates and state that was saved are never excused in this way.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from chronicle.resume.checks.check import Check, Outcome, attempt
from chronicle.resume.checks.memory import check_memory, check_mode
from chronicle.resume.contract import Expectation
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.rules import judge
from chronicle.resume.trained import check_trained

VERSION = 1
NUM_KEPT = 64  # files of one launch and rank
NUM_RANKS = 8  # that keep theirs; the others read rank 0's
NUM_HABITS = 64
LOSS_FACTOR = "loss-factor "  # a habit that the envelope keeps (`motion.LossFactor`)
AS_FIRST_PASS = "so it was in the first pass, right before the step that followed this save"
OTHER_LAYERS = "this training trains other layers from time to time"
A_HABIT = "this training changes it between a save and its next step; the launch that saved ended before that step"
# What a habit excuses: never an LR, a count or a position, which a lost state would change as well.
SPLIT = ("accumulation", "micro batch", "batch size", "global batch")
HABITS = ("frozen parameters", "training mode", "parameter groups", *SPLIT)


class Sequel:
    """Keeps and compares what follows a save, on one rank. `directory` None: nothing is done."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self.failed: Callable[[str, str], None] = lambda where, error: None  # told of errors of the guard itself
        self._saved: Memory | None = None  # the state whose next step is awaited
        self._habits: list[str] = []  # of this training, oldest first
        self._frozen: list[str] = []  # which parameters took no gradient, one after the other
        self._kept: list[Path] = []

    @property
    def is_awaited(self) -> bool:
        """Whether the next step is the first one after a save."""
        return self._saved is not None

    @property
    def habits(self) -> tuple[str, ...]:
        """Names of what this training has changed between a save and its next step."""
        return tuple(self._habits)

    def saved(self, memory: Memory) -> None:
        """This state was saved."""
        keeps = self._directory is not None and self._rank < NUM_RANKS
        self._saved = memory if keeps and memory.identity.get("id") else None

    def loaded(self) -> None:
        """Another state is in memory: the next step follows no save."""
        self._saved = None

    def resumes(self, memory: Memory | None) -> None:
        """The training goes on from this memory: its habits are ours."""
        self._habits = [name for name in memory.habits if not name.startswith(LOSS_FACTOR)] if memory else []
        self._frozen = list(memory.seen_frozen or [memory.frozen]) if memory else []

    def frozen_now(self, frozen: str) -> tuple[str, ...]:
        """What took no gradient so far in this training, and takes none now."""
        if frozen and frozen not in self._frozen[-1:]:
            self._frozen = [*self._frozen[-(NUM_HABITS - 1) :], frozen]
        return tuple(self._frozen)

    def stepping(self, describe: Callable[[], Memory]) -> None:
        """The first step after a save is about to be taken: keep what is no longer as it was saved."""
        saved, self._saved = self._saved, None
        if saved is None or self._directory is None:
            return
        found = _light(describe())
        for part, why in found.unknown.items():
            if part not in saved.unknown:
                self.failed(f"description of {part} after a save", why)
        # what has moved since the save is the very difference that is looked for
        found = replace(found, trained={**found.trained, "moved": list(saved.trained.get("moved") or ())})
        self.frozen_now(found.frozen)
        checks = list(_compare(Expectation(basis="manifest", memory=_light(saved)), found))
        for check in checks:
            if check.error:
                self.failed(f"check of {check.name} after a save", check.error)
        wrong = [check.name for check in checks if not check.ok]
        self._habits = (self._habits + [name for name in wrong if name not in self._habits])[:NUM_HABITS]
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._path(saved)
        record = {"v": VERSION, **({"memory": found.to_json()} if wrong else {})}
        path.write_text(json.dumps(record, separators=(",", ":"), default=str) + "\n", encoding="utf-8")
        self._kept.append(path)
        if len(self._kept) > NUM_KEPT:
            self._kept.pop(0).unlink(missing_ok=True)

    def _path(self, memory: Memory) -> Path:
        assert self._directory is not None
        return self._directory / f"{memory.identity.get('id')}.{self._rank}"

    def settle(self, checks: Sequence[Check], expected: Expectation | None, found: Memory) -> list[Check]:
        """The checks of a first step; what the first pass had changed in the same way is noted.

        What only shows when both are compared (the moments of a group that was added) is added.
        """
        memory = expected.memory if expected else None
        if expected is None or memory is None or expected.contract is not None or all(check.ok for check in checks):
            return list(checks)
        checks = [_noted(c, OTHER_LAYERS) if not c.ok and _is_in_turn(c.name, memory, found) else c for c in checks]
        known, taken = self._read(memory)
        if known is None:
            excused = set() if taken else set(memory.habits) & set(HABITS)
            return [_noted(check, A_HABIT) if not check.ok and check.name in excused else check for check in checks]
        known = replace(known, lr_source=memory.lr_source, recent_lrs=memory.recent_lrs, used=memory.used)
        again = {(one.name, one.where): one for one in _compare(replace(expected, memory=known), found)}
        # configuration and data are told by their differences alone: what is not told again is equal
        by_difference = {(one.name, one.where) for one in check_trained(expected, found)} if known.trained else set()
        out = []
        for check in checks:
            place = (check.name, check.where)
            twin = again.pop(place, None)
            is_so = place in by_difference if twin is None else twin.ok
            out.append(_noted(check, AS_FIRST_PASS) if not check.ok and is_so else check)
        return [*out, *(one for one in again.values() if not one.ok or one.error)]

    def _read(self, memory: Memory) -> tuple[Memory | None, bool]:
        """What followed the save of this memory, where that was something else; and whether its next step was seen.

        Of a rank that did not save itself, it is what rank 0 saw, as the description of the checkpoint is.
        """
        if self._directory is None or not memory.identity.get("id"):
            return None, False
        own = self._path(memory)
        try:
            record = json.loads((own if own.exists() else own.with_suffix(".0")).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None, False
        if not isinstance(record, dict) or record.get("v") != VERSION:
            return None, False
        return (Memory.from_json(record["memory"]) if isinstance(record.get("memory"), dict) else None), True


def _is_in_turn(name: str, memory: Memory, found: Memory) -> bool:
    """Whether this training trains its layers in turn: they changed, and these are as many, new ones, or came back before.

    Layers that were freed once and are frozen again after a resume are those of its beginning: that stays refused.
    """
    seen = memory.seen_frozen
    if name != "frozen parameters" or len(seen) < 2:
        return False
    as_many = len({one.partition(" (")[0] for one in (*seen, found.frozen)}) == 1
    return as_many or len(set(seen)) < len(seen) or found.frozen not in seen


def _noted(check: Check, why: str) -> Check:
    if check.name == "weights":
        return replace(check, outcome=Outcome.NOTED, cause=f"moved after the load, before the first step: {why}")
    return replace(check, outcome=Outcome.NOTED, cause=f"{check.expected or 'as saved'} → {check.found}: {why}")


def _light(memory: Memory) -> Memory:
    """Of the digests only the weights': moments are the same until the step, what is registered is compared at the load."""
    groups = tuple(replace(group, moment_norm=None) for group in memory.groups)
    ranks = tuple(RankDigest(rank=one.rank, weights=one.weights) for one in memory.ranks if one.weights)
    return replace(memory, ranks=ranks, groups=groups, averages={}, objects={})


def _compare(expected: Expectation, found: Memory) -> Iterator[Check]:
    """Everything that a script may change between a save and its next step."""
    memory = expected.memory
    assert memory is not None
    parts: Iterable[tuple[str, str, Callable[[], Iterable[Check]]]] = (
        ("memory", "M1", lambda: check_memory(expected, found, at_first_step=True)),
        ("training mode", "M1", lambda: check_mode(expected, found)),
        ("what is trained", "M6", lambda: check_trained(expected, found)),
    )
    for name, code, work in parts:
        yield from attempt(name, code, work)
    if memory.frozen and found.frozen:
        yield judge(expected, "frozen parameters", memory.frozen, found.frozen)
