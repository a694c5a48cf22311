"""What the guard compares right before the first optimizer step of a launch, in this order; the rows are in `rules.py`.

Always: the optimizer that steps is the guarded one, and every scheduler drives a guarded one; as many ranks train as requested;
a launch that loaded nothing is the first of its run, or asked for a fresh start; what a rollback asked for is being applied.
After a resume, against the checkpoint's manifest or a rollback's contract: memory (`check_memory`), what
is trained (`check_trained`), buffers, frozen parameters and objects as of the load (`check_loaded`), whether the state was
sound and is the newest, the data position, and the first batch of every rank.

Files and random generators are compared at the load (`load.py`). Every load of a process opens its own expectation, so all this
happens again after it. A value that was not recorded at the save is not compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.resume.allowed import leave_open
from chronicle.resume.checks.check import Check, Outcome, attempt, noted
from chronicle.resume.checks.memory import PARTS, check_loaded, check_memory
from chronicle.resume.checks.run import check_identity, check_ranks, check_unspoilt, drives, shares_parameters
from chronicle.resume.contract import requested_ranks
from chronicle.resume.fingerprint import LiveState, fingerprint_memory
from chronicle.resume.first_gradient import NAME as GRADIENT
from chronicle.resume.horizon import ABOUT_LRS, SCHEDULE
from chronicle.resume.learning_rate import forecast_lrs
from chronicle.resume.lr_in_use import NUM_TRIPWIRE_STEPS, LrTripwire
from chronicle.resume.memory import OTHERS, Memory
from chronicle.resume.parts import Parts
from chronicle.resume.trained import check_trained
from chronicle.resume.verdict import StartingPoint, run_checks

MOMENT = "before the first step"


class FirstStep:
    """Judges the first optimizer step of a launch, and the first one after every load."""

    def __init__(self, parts: Parts, *, gradients_later: bool) -> None:
        self._parts, self._gradients_later = parts, gradients_later
        self._training = parts.training
        self._goes_on_everywhere = False  # every rank began with the batch that followed the save

    def concerns(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is a step of the guarded training."""
        if optimizer is None:
            return True
        live, start = self._training.observe(), self._training.start
        if not live.optimizers and not live.models and start.loaded_from is not None and self._parts.verdicts.refusal is None:
            return True  # the load came before anything was prepared, and loaded nothing
        return any(optimizer is known for known in live.optimizers) or shares_parameters(optimizer, live.models)

    def concerned(self, optimizer: Any) -> bool:
        """Whether this optimizer was guarded when the launch was refused; for a moment at which nobody can look."""
        known = self._training.optimizers
        return optimizer is None or not known or any(optimizer is one for one in known)

    def cannot_be_told(self) -> str:
        """The guard failed to find out whether a step is the first of its training; returns why."""
        parts = self._parts
        if parts.ranks.world_size > 1:  # the other ranks ask for this one's report, and a refusal of theirs is one
            with parts.training.contained("first step"):
                parts.data.gather()
            parts.verdicts.decide((), MOMENT, parts.start.loaded_from)
        where, error = parts.faults.found[-1] if parts.faults.found else ("first step", "it is not known why")
        return f"the guard failed at its {where} ({error})"

    def judge(self, optimizer: Any) -> None:
        """Compare, and refuse on every rank where anything differs; else the training begins."""
        parts, training = self._parts, self._training
        if training.off:
            with training.contained("first step"):
                parts.verdicts.switched_off(MOMENT)
                self._say_what_is_not_applied()
            return
        with training.contained("first step"):
            self._goes_on_everywhere = parts.data.gather() or parts.ranks.world_size == 1
        # a launch that loaded nothing has nothing at stake, unless the run has something to resume from
        parts.verdicts.recall(parts.loads.pending)
        checks = run_checks("memory", lambda: self._check(optimizer), at_stake=parts.start.resumed)
        parts.verdicts.decide(checks, MOMENT, parts.start.loaded_from)
        if all(check.ok for check in checks):
            with training.contained("verdict"):
                parts.verdicts.conclude(checks, MOMENT)
                self._warn_of_data()
        parts.data.begin()
        with training.contained("pulse"):
            parts.report.lives()
        with training.contained("first batch in words"):
            parts.first_batch.tell(training.observe(), parts.start.start_step)
        with training.contained("facts of this launch"):
            parts.report.begin(training.observe(), parts.first_batch, parts.data.first)

    def _warn_of_data(self) -> None:
        start = self._training.start
        if self._parts.first_gradient.seeded_alike(start.expectation) and not start.again:
            self._parts.data.warn((start.start_step or 0) + 1)

    def _check(self, optimizer: Any) -> Iterator[Check]:
        parts, training, start = self._parts, self._training, self._training.start
        live = training.live()
        parts.loads.look_again(live)
        training.trains(live)
        if optimizer is not None and not any(drives(optimizer, known) for known in training.optimizers):
            parts.describer.others.add(type(optimizer).__name__)
        parts.lrs.knows(live.schedulers)
        found, expected = fingerprint_memory(live), start.memory
        with training.contained("record of what is trained"):
            found = replace(found, trained=parts.trained.begin(live, expected.trained if expected else None))
        # an optimizer without counters (SGD) does not know its step: the loaded memory does
        start.learn(start_step=next((m.step for m in (found, expected) if m and m.step is not None), 0))
        parts.lrs.foretell(found.next_lrs)
        checks = list(self._compare(live, found, optimizer))
        settled = leave_open(checks)
        with training.contained("first step"):
            settled = parts.loads.settle(checks, live, found)
            parts.reference.resumes(expected)
            parts.moving.resumes(self._known_to_move(expected))
            parts.reference.frozen_now(found.frozen)
        yield from settled
        if not self._gradients_later and all(check.ok for check in settled):  # else another gradient is what follows from it
            yield from self.compare_gradient(optimizer)
        with training.contained("first step"):
            parts.reference.options.see(live.optimizers)
            parts.loads.trained(live.models)
        if start.expectation is None:
            yield from _undescribed(found)
        else:
            yield from attempt("learning rate in use", "L1", lambda: self._begin_tripwire(live, found, settled))

    def _compare(self, live: LiveState, found: Memory, optimizer: Any) -> Iterator[Check]:
        """Every comparison of this page, in its order. `found` describes the memory of `live`; `optimizer` is about to step."""
        loads, start, options = self._parts.loads, self._training.start, self._training.options
        yield from attempt("identity of the optimizer", "M5", lambda: check_identity(live, optimizer, _others(start)))
        if not loads.expectation(None, None).accepts("world_size"):
            asked, ranks = requested_ranks(self._training.environ), self._training.ranks
            yield from attempt("ranks", "PF04", lambda: check_ranks(asked, ranks.world_size))
        if start.loaded_from is None:
            yield from attempt("resume", "L2", lambda: loads.check_unseen(found, live, optimizer))
        loads.read_again()
        yield from attempt("options of the rollback", "M4", lambda: self._begin_options(live))
        expectation = start.expectation
        if expectation is None:
            return
        if start.loaded_from is None:
            yield from attempt("sound weights", "F11", lambda: check_unspoilt(expectation.memory, None))
        yield from attempt("memory", "M1", lambda: check_memory(expectation, found, rank=live.rank, at_first_step=True))
        same = options.same_data
        yield from attempt("what is trained", "M6", lambda: check_trained(expectation, found, same_data=same))
        yield from attempt("owner", "M6", loads.check_owner)
        state = loads.state
        if state is not None:
            yield from attempt("state after the load", "M1", lambda: check_loaded(expectation, state, found, rank=live.rank))
        yield from attempt("newest checkpoint", "F9", loads.check_newest)
        yield from attempt("next batch", "M4", lambda: loads.data.check(live.data))

    def _begin_options(self, live: LiveState) -> list[Check]:
        start, honours = self._training.start, self._parts.honours
        checks = honours.begin(start.expectation, live, start.start_step or 0)
        start.learn(carried=honours.carried)
        return checks

    def compare_gradient(self, optimizer: Any) -> Iterator[Check]:
        """The first gradient after a resume, where it must be equal."""
        if not self._goes_on_everywhere:
            return iter(())
        parts = self._parts
        expectation, place = parts.start.expectation, self._training.place_of(optimizer)
        return attempt(GRADIENT, "M6", lambda: parts.first_gradient.compare(expectation, place, optimizer))

    def _known_to_move(self, expected: Memory | None) -> Sequence[str]:
        """What the training that is resumed moves itself: as the checkpoint knew it, and as it was seen after it."""
        saved = expected.of_rank(self._parts.ranks.rank) if expected else None
        if expected is None or saved is None:
            return ()
        return (*saved.moving, *self._parts.moving.after(expected.state_id))

    def _begin_tripwire(self, live: LiveState, found: Memory, settled: Sequence[Check]) -> Iterator[Check]:
        expectation = self._training.start.expectation
        assert expectation is not None
        # where the LRs are others and may be, or could not be compared, the promised ones do not hold any more
        excused = (Outcome.NOTED, Outcome.NOT_COMPARED)
        changed = any(check.outcome in excused for check in settled if check.name in (*ABOUT_LRS, SCHEDULE))
        longer = changed or any(check.error for check in settled)
        own = None
        if found.next_lrs is not None:
            own = forecast_lrs(live.optimizers, live.schedulers, NUM_TRIPWIRE_STEPS)
        self._parts.lrs.arm(LrTripwire.after(expectation, found, own, longer=longer))
        yield from ()

    def _say_what_is_not_applied(self) -> None:
        """A guard that is off does not apply options of a rollback either."""
        parts = self._parts
        try:
            contract = parts.loads.contract() if parts.ranks.rank == 0 else None
        except ChronicleError:
            return
        if contract is None or contract.rollback in parts.journal.read().fulfilled:
            return
        if options := parts.honours.not_by_script(contract):
            parts.journal.say("off", f"the guard is off: {options} of rollback {contract.rollback} will not be applied")


def _undescribed(found: Memory) -> Iterator[Check]:
    """What a resume will not compare, because it cannot be described now."""
    for part, why in found.unknown.items():
        cause = f"it cannot be described, so a resume will not compare it: {why}"
        yield noted(PARTS.get(part, part), "M1", cause=cause)


def _others(start: StartingPoint) -> Sequence[str] | None:
    """Classes of optimizers that stepped the same parameters before the save; None when nothing was loaded."""
    memory = start.memory or Memory()
    return tuple(memory.topology.get(OTHERS) or ()) if start.resumed else None
