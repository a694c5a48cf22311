"""THE reference: what a resumed run must look like right before its first step.

A save is not always the state in which the next step is taken. A script frees its frozen layers at the third epoch, adds a
parameter group, sets the LR of the next step by hand, takes the data of the next stage, moves a momentum encoder. A resume does
the same after its load. So the right thing to compare with is what the first pass had right before *its* next step. A launch
that goes on after a save describes memory once more there, without the digests of moments. `<run>/sequels/<state>.<rank>` keeps
the description if it differs from the save, and else only says that it does not.

Where the launch ended right at its save there is no such file, and the save is the reference. What is known then is what this
training does by itself, which every checkpoint carries: what it changed between earlier saves and their next steps (`habits`),
which layers it froze, and which options it moved.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume.beside import StateFiles
from chronicle.resume.checks.check import Check, attempt
from chronicle.resume.checks.memory import check_memory
from chronicle.resume.contract import Expectation
from chronicle.resume.events import Loaded, Saved, StepBegins
from chronicle.resume.fingerprint import groups_of
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.learning_rate import number
from chronicle.resume.memory import LrRow, Memory, RankDigest
from chronicle.resume.rules import judge
from chronicle.resume.trained import check_trained

VERSION = 1
NUM_HABITS = 64

Place = tuple[str, str]  # name of a check, and where


class Reference(Observer):
    """Keeps and reads it, on one rank. `directory` None: nothing is kept. `describe()`: memory right before the next step.

    `failed` is told of errors of the guard itself.
    """

    about = "what follows a save"

    def __init__(
        self,
        directory: Path | None,
        rank: int,
        describe: Callable[[], Memory],
        failed: Callable[[str, str], None] = lambda where, why: None,
    ) -> None:
        self._files = StateFiles(directory, rank, version=VERSION)
        self._describe, self._failed = describe, failed
        self._saved: Memory | None = None  # the state whose next step is awaited
        self._frozen: list[str] = []  # which parameters took no gradient, one after the other
        self.habits: tuple[str, ...] = ()  # names of what this training has changed between a save and its next step
        self.options = OptionValues()

    def saved(self, event: Saved) -> None:
        """The step after it is awaited."""
        if event.is_of_now and event.memory is not None:
            self._saved = event.memory if self._files.keeps and event.memory.state_id else None

    def loaded(self, event: Loaded) -> None:
        """The next step follows no save."""
        self._saved = None

    def resumes(self, memory: Memory | None) -> None:
        """The training goes on from this memory: its past is ours."""
        past = memory or Memory()
        self.habits = past.habits
        self._frozen = [one for one in past.seen_frozen or (past.frozen,) if one]
        self.options.moved = set(past.moved_options)

    def frozen_now(self, frozen: str) -> tuple[str, ...]:
        """What took no gradient so far in this training, and takes none now."""
        if frozen and frozen not in self._frozen[-1:]:
            self._frozen = [*self._frozen[-(NUM_HABITS - 1) :], frozen]
        return tuple(self._frozen)

    def step_begins(self, event: StepBegins) -> Rest:
        """The first step after a save is about to be taken: keep what is no longer as it was saved."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._keep(saved)
        return RESTS

    def _keep(self, saved: Memory) -> None:
        found = _light(self._describe())
        for part, why in found.unknown.items():
            if part not in saved.unknown:
                self._failed(f"description of {part} after a save", why)
        # what has moved since the save is the very difference that is looked for
        found = replace(found, trained={**found.trained, "moved": list(saved.trained.get("moved") or ())})
        self.frozen_now(found.frozen)
        checks = list(_compare(Expectation(basis="manifest", memory=_light(saved)), found))
        for check in checks:
            if check.error:
                self._failed(f"check of {check.name} after a save", check.error)
        wrong = [check.name for check in checks if not check.ok]
        self.habits = tuple(dict.fromkeys((*self.habits, *wrong)))[:NUM_HABITS]
        self._files.write(saved.state_id, {"memory": found.to_json()} if wrong else {})

    def compare(self, expected: Expectation, memory: Memory, found: Memory) -> tuple[bool, set[Place], list[Check]]:
        """Whether the next step after this save was seen; what is as it was there; and what differs from it.

        Of a rank that did not save itself, it is what rank 0 saw, as the description of the checkpoint is.
        """
        record = self._files.read(memory.state_id)
        if not isinstance(record.get("memory"), dict):
            return bool(record), set(), []
        then = Memory.from_json(record["memory"])
        then = replace(then, lr_source=memory.lr_source, recent_lrs=memory.recent_lrs)
        wrong = [check for check in _compare(replace(expected, memory=then), found) if not check.ok or check.error]
        places = {(check.name, check.where) for check in wrong}
        at_save = _compare(replace(expected, memory=_light(memory)), found)
        return True, {place for check in at_save if (place := (check.name, check.where)) not in places}, wrong


def _light(memory: Memory) -> Memory:
    """Of the digests only the weights': moments are the same until the step, what is registered is compared at the load."""
    ranks = tuple(RankDigest(rank=one.rank, weights=one.weights) for one in memory.ranks if one.weights)
    return replace(memory, ranks=ranks, averages={}, objects={})


def _compare(expected: Expectation, found: Memory) -> Iterator[Check]:
    """Everything that a script may change between a save and its next step."""
    memory = expected.memory
    assert memory is not None
    yield from attempt("memory", "M1", lambda: check_memory(expected, found, at_first_step=True))
    yield from attempt("what is trained", "M6", lambda: check_trained(expected, found))
    if memory.frozen and found.frozen:
        yield judge(expected, "frozen parameters", memory.frozen, found.frozen)


# ---- the options of the parameter groups -------------------------------------------------------------------------------

LR = "lr"
NOT_OPTIONS = {"params", "initial_lr", "max_lr", "min_lr", "step"}

Rows = Mapping[str, LrRow]  # name of an option that is a number -> one value per parameter group


class OptionValues:
    """What one process knows of the numbers in its parameter groups. `moved`: names of those that changed in this training."""

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self._seen: dict[str, LrRow] = {}
        self._built: weakref.WeakKeyDictionary[Any, Rows] = weakref.WeakKeyDictionary()  # before the latest load
        self._read: weakref.WeakKeyDictionary[Any, Rows] = weakref.WeakKeyDictionary()  # right after it

    def before_load(self, optimizers: Iterable[Any]) -> None:
        """A state is about to be loaded: what the options are now is what the script's constructor gave."""
        for optimizer in optimizers:
            self._built[optimizer] = option_rows((optimizer,))
            self._read.pop(optimizer, None)

    def after_load(self, optimizers: Iterable[Any]) -> None:
        """A state was loaded, and nothing else has set an option yet."""
        for optimizer in optimizers:
            self._read[optimizer] = option_rows((optimizer,))

    def at_load(self, name: str, optimizers: Sequence[Any]) -> tuple[LrRow, LrRow]:
        """One option before and right after the load; empty where the load of an optimizer was not seen."""
        if not all(one in self._built and one in self._read for one in optimizers):
            return (), ()
        rows: list[LrRow] = []
        for known in (self._built, self._read):
            values = [known[one].get(name) or (None,) * len(one.param_groups) for one in optimizers]
            rows.append(tuple(value for row in values for value in row))
        return rows[0], rows[1]

    def see(self, optimizers: Iterable[Any]) -> None:
        """At the first step of a launch and at its saves."""
        for name, row in option_rows(optimizers).items():
            if self._seen.setdefault(name, row) != row:
                self.moved.add(name)


def option_rows(optimizers: Iterable[Any]) -> dict[str, LrRow]:
    """Every option that is a number, in all parameter groups in order."""
    groups = [group for _, group in groups_of(optimizers)]
    numbers = {name for group in groups for name, value in group.items() if number(value) is not None}
    flags = {name for group in groups for name, value in group.items() if isinstance(value, bool)}
    return {name: tuple(number(group.get(name)) for group in groups) for name in sorted(numbers - flags - NOT_OPTIONS)}
