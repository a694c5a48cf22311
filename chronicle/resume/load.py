"""A load under guard: the expected state, what the files and the memory hold, and what is checked later.

Two kinds of loads exist. An adapter announces the load of a checkpoint directory before and after it happens. A plain
loop loads an optimizer state, which carries its own description of memory. A trainer that loads without either is
compared with the checkpoint of its step in the journal (`check_unseen`).

Every load opens an expectation of its own, also a second one of a process (a recovery, an evaluation). Whether training
follows is not known at a load: what differs is said and kept in `pending`, and the first optimizer step after it refuses what
still differs. Two cases refuse earlier, because training is sure to follow: a trainer announces it, or the first load of a
process has an optimizer and models in training mode (then damaged files are refused before any state is replaced).
"""

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.resume import allowed, unregistered
from chronicle.resume.allowed import OF_WEIGHTS, Allowance, Kind, allow
from chronicle.resume.checks.check import Check, not_compared, noted
from chronicle.resume.checks.memory import check_generators, check_memory
from chronicle.resume.checks.run import (
    check_contract,
    check_digest,
    check_files,
    check_fresh_start,
    check_newest,
    check_run_state,
    check_trained_numbers,
    check_unspoilt,
    drives,
)
from chronicle.resume.configuration import plain_name
from chronicle.resume.contract import Contract, Expectation, accepted_changes, load_contract, same_checkpoint
from chronicle.resume.data import DataWatch
from chronicle.resume.events import BatchEntered, Inputs
from chronicle.resume.feed import LENGTH, ROWS
from chronicle.resume.fingerprint import (
    LiveState,
    fingerprint_memory,
    frozen_parameters,
    groups_of,
    moments_apart,
    rng_digests,
    rounded_weights,
    weights_and_each,
    weights_apart,
)
from chronicle.resume.honours import Honours
from chronicle.resume.horizon import ABOUT_THE_FUTURE, longer_schedule
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.journal import FURTHER, RENEWED, TRAINED_ON, GuardHistory
from chronicle.resume.memory import WHOLE, Memory, RankDigest
from chronicle.resume.moving import Facts, LoadedState, Moving, facts_of, facts_of_buffers, facts_of_objects
from chronicle.resume.records import NOT_RECORDED, Records
from chronicle.resume.reference import LR, Reference
from chronicle.resume.rules import listed
from chronicle.resume.save import read_memory
from chronicle.resume.training import Training
from chronicle.resume.verdict import StartingPoint
from chronicle.story.plain import plain
from rollback.checkpoint.manifest import OtherVersion
from rollback.errors import RollbackError
from rollback.files.safetensors_file import list_tensors

_trained: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models that took a guarded step in this process
BEGINS_ANEW = "it is from before the first step: the optimizer begins anew"  # an LR finder, a restart
AT_STEP = "the guard saw no load, but the optimizer is at step {}"
WEIGHTS_ALONE = (
    "weights were loaded, and the optimizer begins without state, in a run that was trained before: momentum and schedule were "
    "not restored; a start from scratch on purpose says fresh_start=True"
)
SAVED_NOTHING = "nothing was loaded: the launch before began a further training here, and saved nothing of it"
STILL_FURTHER = {**FURTHER, "why": SAVED_NOTHING}


class Loads(Observer):
    """The loads of one process. What they promise is in `start`, what the last one left in memory in `state`."""

    about = "load"

    def __init__(
        self,
        training: Training,
        data: DataWatch,
        honours: Honours,
        reference: Reference,
        moving: Moving,
        records: Records,
    ) -> None:
        self._training = training
        self._options, self._journal, self._ranks = training.options, training.journal, training.ranks
        self.start, self.data, self.honours = training.start, data, honours
        self._reference, self._moving, self._records = reference, moving, records
        self.state: LoadedState | None = None
        self.pending: list[Check] = []  # of the latest load, for its first optimizer step
        self.weights_loaded = False  # into a guarded model, by its own `load_state_dict`
        self._by_weights = False  # the optimizer's state was not known: what was saved is looked for by the weights
        self._opening = StartingPoint()  # of the load that has begun
        self._objects_before: Mapping[str, str] = {}
        self._earlier: Facts | None = None  # buffers before the first forward pass without gradients, and how many came
        self._passes = 0
        self._at_batch = ""  # digest of the weights when the first batch came

    @staticmethod
    def intends_to_train(live: LiveState) -> bool:
        """Whether a process that has not trained yet loads in order to train: an optimizer, training mode, gradients."""
        torch: Any = sys.modules.get("torch")
        training = any(getattr(model, "training", False) for model in live.models)
        return bool(live.optimizers) and training and (torch is None or bool(torch.is_grad_enabled()))

    def defer(self, checks: Sequence[Check]) -> None:
        """Keep what a load shows until an optimizer step follows."""
        self.pending += checks

    def forget(self) -> None:
        """Nothing that is pending is judged."""
        self.pending = []

    def saw_weights(self) -> None:
        """A guarded model has loaded weights by its own `load_state_dict`."""
        self.weights_loaded = True

    def say_pending(self, *, trains: bool) -> None:
        """One line about what differs after a load. `trains`: an optimizer is known; without one only weights matter."""
        wrong = [c.name for c in self.pending if not c.ok and (trains or c.name in OF_WEIGHTS or c.code.startswith("F"))]
        if self._ranks.rank != 0 or not wrong:
            return
        place, names = self.start.place, listed(wrong, 4)
        text = f"{place} is not as it was saved: {names}; said only, an optimizer step from here is refused"
        self._journal.say(text, text)

    def settle(self, checks: Sequence[Check], live: LiveState, found: Memory) -> list[Check]:
        """The checks of a first step with what its load showed and was not compared again; what is allowed is noted."""
        names = {check.name for check in checks}
        every = [*checks, *(check for check in self.pending if check.name not in names)]
        expected, again = self.start.expectation, self.start.again
        memory = expected.memory if expected else None
        if all(check.ok for check in every):
            return every
        if expected is None or memory is None:
            nothing = Expectation(basis="none")
            return allow(every, allowed.Facts(expected=nothing, memory=Memory(), found=found, is_reload=again))
        differ = {check.name for check in every if not check.ok}
        seen, as_first, more = self._reference.compare(expected, memory, found) if expected.contract is None else (True, (), ())
        facts = replace(
            self._about_schedule(expected, memory, found),
            is_seen=seen,
            as_first=frozenset(as_first),
            is_reload=again,
            half=rounded_weights(live) if "weights" in differ else "",
            moved=self._moved_weights(memory, live) if "weights" in differ else None,
            own_modes=frozenset(own_modes(memory, found, live)),
            options={name: self._reference.options.at_load(name, live.optimizers) for name in (LR, *differ)},
            last_rollback=self.contract(),
        )
        known = {(check.name, check.where) for check in every}
        more = [check for check in more if check.name not in (ROWS, LENGTH)]  # of a single step these prove nothing
        every += [check for check in more if (check.name, check.where) not in known]
        return self._name_tensors(allow(every, facts), live)

    def _about_schedule(self, expected: Expectation, memory: Memory, found: Memory) -> allowed.Facts:
        """What is known of a schedule that may have been made longer."""
        unknown = {**memory.unknown, **found.unknown}.get("schedulers", "")
        may_be = not unknown and expected.contract is None
        longer = longer_schedule(memory, found) if may_be else None
        return allowed.Facts(expected=expected, memory=memory, found=found, longer=longer, unknown_schedule=unknown)

    def _moved_weights(self, memory: Memory, live: LiveState) -> Allowance | None:
        """Why weights that are not as saved may be: they were when the first batch came, and the script itself moved them."""
        own = memory.of_rank(live.rank)
        if own is None or not own.weights or self._at_batch != own.weights:
            return None
        return Allowance(Kind.FIRST_PASS, "as saved when the first batch came; since then the script itself moved them")

    def trained(self, models: Sequence[Any]) -> None:
        """These models take a guarded step in this process."""
        _trained.update(models)

    def check_before(self, root: Path, memory: Memory | None, live: LiveState, *, again: bool = False) -> list[Check]:
        """Files and journal, before any state is replaced. `memory`: what the adapter read inside the checkpoint.

        `again`: this process has trained already.
        """
        self._opening, self.pending, self._earlier, self._passes = StartingPoint(again=again), [], None, 0
        opening, self._objects_before = self._opening, facts_of_objects(live)
        self._reference.options.before_load(live.optimizers)
        contract, unknown = self.contract(), list[Check]()
        if memory is None:
            memory, unknown = _memory_of(root)
        if memory is not None and (why := memory.unknown.get(WHOLE)):  # the guard failed at the save, or at reading it
            opening.learn(no_basis=why)
            unknown, memory = [not_compared("memory", "M1", why, where=str(root))], None
        identity = {} if memory is None else memory.identity
        opening.learn(identity=identity, expectation=self._expect(root, memory, contract))
        if self._ranks.rank != 0:
            return []  # one rank reads files and journal, all hear the verdict
        history = self._journal.read()
        opening.learn(identity=history.states.identity_of(root, identity))
        # a rollback edits the file: then its digest in the journal is out of date
        known = None if opening.expectation and opening.expectation.contract else history.digests.get(str(root))
        files = [*check_files(root), *check_digest(root, known)]
        if not any(check.code == "F11" for check in files):
            files += check_unspoilt(memory, root)
        sealed = memory is not None or bool(unknown)
        state = check_run_state(root, sealed, history)
        return [*files, *unknown, *check_contract(contract, root, memory, history), *state]

    def opened(self, root: Path | None) -> None:
        """The checkpoint at `root` was loaded: its expectation replaces the one before. None: it is about to be."""
        self._opening.learn(loaded_from=root)
        self.start.adopt(self._opening)

    def begin_anew(self) -> None:
        """A further training begins in this process, with the weights in memory or with a load that is still to come."""
        self.start.adopt(StartingPoint(again=True))
        self.state, self.pending = None, []

    def read_again(self) -> None:
        """The main process may still have been writing the manifest when this rank loaded."""
        root, expectation = self.start.loaded_from, self.start.expectation
        if root is not None and expectation is not None and expectation.memory is None and root.is_dir():
            memory, _ = _memory_of(root)
            if memory is not None:
                found = self._expect(root, memory, self.contract())
                self.start.learn(identity=memory.identity or self.start.identity, expectation=found)

    def check_after(self, live: LiveState) -> list[Check]:
        """Memory right after the load, on every rank."""
        self._reference.options.after_load(live.optimizers)
        found = fingerprint_memory(live)
        facts = facts_of(live)
        self.state = LoadedState(facts=facts, frozen=found.frozen, objects_before=self._objects_before)
        self._earlier = facts
        self.data.was_loaded(live.data)
        self.honours.loaded(self.start.expectation, live)
        expected = self.start.expectation or Expectation(basis="none")
        checks = check_memory(expected, found, rank=live.rank)
        if expected.memory is not None and any(not check.ok for check in checks):
            about = self._about_schedule(expected, expected.memory, found)
            ahead = [check for check in checks if check.name in ABOUT_THE_FUTURE]
            checks = [*(check for check in checks if check not in ahead), *allow(ahead, about)]
        return self._name_tensors(checks, live)

    def _name_tensors(self, checks: Sequence[Check], live: LiveState) -> list[Check]:
        """The checks; weights and moments that differ are named."""
        memory = self.start.memory
        saved = memory.of_rank(live.rank) if memory else None
        named = []
        for check in checks:
            if not check.ok and check.name == "weights":
                apart = weights_apart(saved.each, live) if saved is not None else []
                check = _with_names(check, apart, len(saved.each) if saved else 0)
                check = replace(check, cause=_without_entry(self.start.loaded_from, apart) or check.cause)
            elif not check.ok and check.name == "optimizer moments" and saved is not None:
                check = _with_names(check, moments_apart(saved.each_moment, live), len(saved.each_moment))
            named.append(check)
        return named

    def check_generators(self, topology: Mapping[str, Any]) -> list[Check]:
        """Random generators of this rank; call it once the framework has restored them."""
        if self.start.expectation is None:
            return []
        rank = self._ranks.rank
        found = Memory(ranks=(RankDigest(rank=rank, rng=rng_digests()),), topology=topology)
        return check_generators(self.start.expectation, found, rank=rank)

    def state_loaded(self, memory: Memory | None, live: LiveState) -> None:
        """A plain loop loads an optimizer state that was saved with `memory`; it is compared at the first step."""
        self._by_weights = memory is None and self.start.no_basis == NOT_RECORDED
        if self._by_weights and not self.start.again:  # in a process that has trained, the weights may be of another save
            found = self._record_of_weights(live)
            if found is not None and found.step:
                self.start.learn(no_basis="")
                memory = found
        self.pending, self._earlier, self._passes = [], None, 0
        if self.start.again and memory is not None and not memory.step:
            self.start.learn(no_basis=BEGINS_ANEW)
            memory = None
        self.start.learn(state_loaded=True, identity={} if memory is None else memory.identity)
        contract, step = self.contract(), memory.step if memory else None
        bound = contract if contract is not None and step is not None and contract.step == step else None
        self.start.learn(expectation=self.expectation(memory, bound))
        self.honours.loaded(self.start.expectation, live)
        self._at_batch = ""

    def look_again(self, live: LiveState) -> None:
        """The optimizer's state was not known by itself; the weights that were loaded after it may be."""
        if not self._by_weights or not self.start.state_loaded:
            return
        memory = self._record_of_weights(live)
        if memory is not None and memory.identity != self.start.identity:
            self.start.learn(no_basis="")
            self.state_loaded(memory, live)
            self._by_weights = True

    def _record_of_weights(self, live: LiveState) -> Memory | None:
        return self._records.of_weights(weights_and_each(live)[0])

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """What comes before the first batch, or is it."""
        if self._training.off or not event.is_first:
            return RESTS
        if event.kind is Inputs.BATCH:
            self._first_batch()
        elif event.is_training or self.start.resumed:  # a forward pass without gradients
            self._passes += event.is_training
            if self._earlier is None:
                self._earlier = facts_of_buffers(self._training.observe().models)
        return None

    def _first_batch(self) -> None:
        """The first batch is about to change running statistics: note them now.

        An adapter's load is known already. A plain loop does not announce its loads, so what it holds now is what it loaded.
        """
        if self.state is not None or self.start.state_loaded:
            live = self._training.observe()
            self.look_again(live)
            state = self.state or LoadedState(frozen=frozen_parameters(live), facts=facts_of_objects(live))
            memory = self.start.memory
            saved = memory.of_rank(live.rank) if memory else None
            then = self._moving.after(memory.state_id) if memory else {}
            self.state = replace(
                state,
                facts={**state.facts, **facts_of_buffers(live.models)},
                earlier=self._earlier or {},
                passes=self._passes,
                then=then,
                keys=(*saved.moving, *then) if saved else (),
                unregistered=unregistered.facts_of(live) if memory and memory.unregistered else {},
            )
            self._at_batch = weights_and_each(live)[0]
            self._earlier, self._passes = None, 0

    def check_unseen(self, found: Memory, live: LiveState, optimizer: Any = None) -> list[Check]:
        """For a launch in which no adapter saw a load: the trainer loads by itself, or it loaded nothing.

        A trainer at the step of a checkpoint in the journal is compared with that checkpoint. Only the first launch of a run,
        and one that asked for a fresh start, may load nothing.
        """
        contract, expectation = self.contract(), self.start.expectation
        if self.start.state_loaded and (self._options.fresh_start or (expectation and expectation.memory)):
            return []  # the state itself carried its description
        if self.start.no_basis == BEGINS_ANEW:
            return []  # which is said
        if any(model in _trained for model in live.models):
            return _begins_anew(TRAINED_ON if any(group.num_states for group in found.groups) else RENEWED)
        history = self._journal.read()
        pending = contract if contract is not None and contract.rollback not in history.fulfilled else None
        step = found.optimizer_steps[1] if found.optimizer_steps else 0
        if pending is None and not self.start.state_loaded and not self._options.fresh_start:
            answer = self._loads_nothing(found, live, optimizer, history, step)
            if answer is not None:
                return answer
        # one of step 0 holds nothing that was trained: an LR finder saves it, to come back to it
        if self._options.fresh_start or (pending is None and not any(saved for saved, _ in history.checkpoints)):
            return []
        is_main = self._ranks.rank == 0
        root = next(
            (Path(path) for saved, path in reversed(history.checkpoints) if step and saved == step and path), None
        )
        memory = None if root is None else _memory_of(root)[0]
        # an optimizer without state beside one that has steps: part of the state was not loaded
        whole = all(group.num_states or not group.num_params for group in found.groups)
        unknown = (root is None or memory is None) and whole
        if unknown and step and not self.start.state_loaded and (pending is None or pending.optimizer_step == step):
            self._loaded_unseen(AT_STEP.format(step), pending)
        if root is None or memory is None:
            if not is_main or self.start.state_loaded:
                return []
            newest = next((Path(path) for _, path in reversed(history.checkpoints) if path), None)
            saved = None if newest is None else _memory_of(newest)[0]
            return [*check_fresh_start(found, history, pending), *check_trained_numbers(found, saved)]
        self.start.learn(loaded_from=root, expectation=self._expect(root, memory, contract))
        if _are_same_weights(found, memory):  # its step alone would not show that this is what was loaded
            self.start.learn(identity=memory.identity)
        self.honours.loaded(self.start.expectation, live)
        return [*check_files(root), *check_contract(contract, root, memory, history)] if is_main else []

    def _loads_nothing(
        self, found: Memory, live: LiveState, optimizer: Any, history: GuardHistory, step: int
    ) -> list[Check] | None:
        """The checks of a launch that was seen to load nothing and did not say so; None where it should have resumed.

        `step`: that of its optimizer.
        """
        if _is_stray(optimizer, live):
            why = "another optimizer than the attached one is stepped, and it has state: the guard saw no load of it"
        elif not any(saved for saved, _ in history.checkpoints):
            why = AT_STEP.format(step) if step else ""
            if not step and self.weights_loaded and history.has_trained:
                why = WEIGHTS_ALONE
            if not why:
                return []
        elif step:
            return None
        elif self.start.again or (history.saved_by is not None and history.saved_by == self._journal.launch):
            return _begins_anew(FURTHER)
        elif history.further:
            return _begins_anew(STILL_FURTHER)
        else:
            why = _left_behind(found, history)
            if not why:
                return None
        self._loaded_unseen(why, None)
        return []

    def _loaded_unseen(self, why: str, pending: Contract | None) -> None:
        """State came into memory by a way that the guard does not see (`torch.load` beside a guarded Accelerator)."""
        self.start.learn(state_loaded=True, no_basis=why, expectation=self.expectation(None, pending))

    def check_newest(self) -> list[Check]:
        """Whether a newer checkpoint was skipped. Not checked at the load: a script that only evaluates may load any."""
        root, expectation = self.start.loaded_from, self.start.expectation
        if root is None or expectation is None or self._ranks.rank != 0 or expectation.accepts("checkpoint"):
            return []
        return check_newest(expectation.memory, root, self._journal.read(), expectation.contract)

    def check_owner(self) -> list[Check]:
        """Noted when another run saved what was loaded, and nobody declared this run a fork or copy of it.

        A run that has checkpoints of its own has a reason to load those: then it is an incident too.
        """
        found, own = self.start.identity, self._journal.run_id
        if self._ranks.rank != 0 or not own or found.get("run_id") in (None, "", own):
            return []
        history = self._journal.read()
        if found["run_id"] in history.related:
            return []
        name = plain(found.get("run") or found["run_id"])
        belongs = f"this checkpoint belongs to run {name} (launch {found.get('launch')}, step {found.get('step')})"
        cause = f"{belongs}; for a fork on purpose: `chronicle init --from CHECKPOINT`"
        if history.checkpoints and not self.start.again:
            text = f"{belongs}, and this run has checkpoints of its own (the newest of step {history.last_step})"
            self._journal.tell("checkpoint-of-another-run", text, step=self.start.start_step)
        return [noted("run", "M6", expected=own, found=str(found["run_id"]), where="identity in the checkpoint", cause=cause)]

    def contract(self) -> Contract | None:
        """The contract of the run's last rollback. Raises `ChronicleError` when it cannot be read."""
        return load_contract(self._journal.paths.contract_path) if self._journal.paths else None

    def expectation(self, memory: Memory | None, bound: Contract | None) -> Expectation:
        """What memory must hold, given a checkpoint's memory and the contract that applies to it."""
        return Expectation(
            basis="contract" if bound else ("manifest" if memory else "none"),
            memory=memory,
            contract=bound,
            accepted=accepted_changes(bound, self._options.accept_change),
            by_script=tuple(self._options.honours),
        )

    def _expect(self, root: Path, memory: Memory | None, contract: Contract | None) -> Expectation:
        bound = contract if contract is not None and same_checkpoint(contract, root, memory) else None
        return self.expectation(memory, bound)


def _with_names(check: Check, apart: Sequence[str], num_digits: int) -> Check:
    """The check with the names of the tensors that differ; `num_digits`: four a tensor were recorded."""
    what = check.name.removeprefix("optimizer ")
    return replace(check, found=f"{len(apart)} of {num_digits // 4} {what} differ: {listed(apart)}") if apart else check


def _without_entry(root: Path | None, apart: Sequence[str]) -> str:
    """Which weights that differ have no entry in a checkpoint's safetensors files, in words; "" for none.

    A loader that goes by names leaves such weights as they were made, without a word.
    """
    saved = set[str]()
    for path in sorted(root.glob("model*.safetensors")) if root is not None and root.is_dir() else ():
        with contextlib.suppress(RollbackError, OSError):  # such files have a check of their own
            saved |= {plain_name(name) for name, *_ in list_tensors(path)}
    lost = sorted(name for name in map(plain_name, apart) if name not in saved and not name.endswith("_flat_param"))
    if not saved or not lost:
        return ""
    return f"{len(lost)} of them have no entry in the checkpoint's files ({listed(lost)}): they are as the model was made"


def _memory_of(root: Path) -> tuple[Memory | None, list[Check]]:
    """The memory a checkpoint was saved with; a manifest of another version is unknown, and no damage."""
    try:
        return read_memory(root), []
    except OtherVersion as problem:
        return None, [not_compared("memory", "F1", problem.message, where=str(root))]


def _begins_anew(words: Mapping[str, str]) -> list[Check]:
    """Noted: a launch that loaded nothing, and may. `words`: the name of the check, and why."""
    return [noted(words["name"], "L2", found="nothing was loaded", cause=words["why"])]


def _are_same_weights(found: Memory, saved: Memory) -> bool:
    """Whether this rank holds the weights that it had at that save, by their digests."""
    own = next(iter(found.ranks), None)
    at_save = None if own is None else saved.of_rank(own.rank)
    return own is not None and at_save is not None and bool(own.weights) and own.weights == at_save.weights


def _left_behind(found: Memory, history: GuardHistory) -> str:
    """Why a launch without the optimizer's state is no start from scratch; "" where it is one, or the state was lost.

    Weights of a state that this run wrote show that it was loaded. Its optimizer is left behind on purpose where it is of
    another class than the one that begins now (Adam, then SGD), or where the first pass went on with a new one as well.
    """
    state = next((history.taken.get(digest.weights) for digest in found.ranks if digest.weights), None)
    if state is None or any(group.num_states for group in found.groups):
        return ""
    old, new = " and ".join(state.optimizers), " and ".join(found.optimizers)
    weights = f"the weights are those of step {state.step}"
    if state.optimizers and old != new:
        return f"{weights}, and {new} begins anew where {old} was saved"
    return f"{weights}, and the optimizer begins anew, as it did in the first pass" if state.renewed else ""


def _is_stray(optimizer: Any, live: LiveState) -> bool:
    """Whether this optimizer is none of those that are guarded, and has state already."""
    return bool(getattr(optimizer, "state", None)) and not any(drives(optimizer, known) for known in live.optimizers)


def own_modes(memory: Memory, found: Memory, live: LiveState) -> Iterator[str]:
    """Flags of parameter groups that changed, of optimizers that have a mode of their own (`train()`, `eval()`)."""
    owners = [optimizer for optimizer, _ in groups_of(live.optimizers)]
    for owner, saved, own in zip(owners, memory.groups, found.groups, strict=False):
        if callable(getattr(owner, "train", None)) and callable(getattr(owner, "eval", None)):
            for name in saved.settings.keys() & own.settings.keys():
                if isinstance(saved.settings[name], bool) and saved.settings[name] != own.settings[name]:
                    yield name
