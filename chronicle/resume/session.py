"""One process under guard: what happens at a save, at a load, right before the first optimizer step, and for 50 steps after.

Adapters call in; this module decides and refuses. It compares values (`checks`, `identity`), lets `sealing` and `files`
touch the disk, and tells the journal (`story`). Errors of its own: at a save they are said once and training goes on;
where unverified state would be trained on, they refuse.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.resume.batches import DataWatch
from chronicle.resume.checks.check import Check, failed
from chronicle.resume.checks.memory import LoadedState, check_entry, check_generators, check_memory, check_mode
from chronicle.resume.checks.run import (
    check_contract,
    check_fresh_start,
    check_identity,
    check_newest,
    check_ranks,
    check_run_state,
    shares_parameters,
)
from chronicle.resume.checks.tripwires import NUM_TRIPWIRE_STEPS, LrTripwire, LrWitness
from chronicle.resume.contract import (
    Contract,
    Expectation,
    Mode,
    Options,
    accepted_changes,
    effective_options,
    launch_number,
    read_contract,
    requested_ranks,
    same_checkpoint,
)
from chronicle.resume.fingerprint import (
    LiveState,
    buffers_digest,
    fingerprint_memory,
    frozen_parameters,
    object_digests,
    rng_digests,
)
from chronicle.resume.honours import Carrying
from chronicle.resume.journal import GuardJournal, find_run_dir
from chronicle.resume.learning_rate import NUM_FORECAST, forecast_lrs
from chronicle.resume.memory import Memory, RankDigest
from chronicle.resume.save import Sealer, check_digest, check_files, checkpoint_root, read_memory
from chronicle.resume.verdict import Beginning, Ranks, Ruling, guarded, reason_of

__all__ = ["GuardSession"]


class GuardSession:
    """State of the guard in one process. `observe` returns the live objects as they are now; the adapter provides it."""

    def __init__(
        self,
        observe: Callable[[], LiveState],
        options: Options,
        *,
        environ: Mapping[str, str] = os.environ,
        ranks: Ranks | None = None,
    ) -> None:
        self._observe = observe
        self.options = effective_options(options, environ)
        self.ranks = ranks or Ranks()
        self._asked_ranks = requested_ranks(environ)
        run_dir, origin = find_run_dir(options.run_dir, environ, Path.cwd())
        self.story = GuardJournal(run_dir, launch=launch_number(environ), is_main=lambda: self.ranks.rank == 0)
        self.sealer = Sealer(self.ranks, self.story)
        if run_dir is None:
            self.story.say("run", f"no run directory ({origin}): verdicts are not recorded")
        self.begun = Beginning()
        self.ruling = Ruling(self.ranks, self.story, self.options, self.begun)
        self.data = DataWatch(
            self.options, self.story, self.sealer, self.begun, lambda: self.step, self._before_first_batch
        )
        self.batches = self.data.batches
        self.carrying = Carrying(self.options.honours)
        self.watch_step: Callable[[], Check | None] | None = None  # what else an adapter looks at before every step
        self.engine_steps = False  # steps are announced by a DeepSpeed engine, not by torch's hook
        self._stepped = False
        self._loading = False
        self._entry: LoadedState | None = None
        self._objects_before: Mapping[str, str] = {}
        self._modes: tuple[bool, ...] | None = None  # of the models, at the last optimizer step
        self._models: tuple[Any, ...] = ()
        self._steps_here = 0
        self._known: tuple[Any, ...] = ()  # the guarded optimizers, from the first step on
        self._recent: deque[tuple[float, ...]] = deque(maxlen=NUM_FORECAST)
        self._witness = LrWitness()
        self._tripwire: LrTripwire | None = None

    @property
    def step(self) -> int | None:
        """Optimizer steps completed, as far as the guard can tell without a transfer from the device."""
        return None if self.begun.start_step is None else self.begun.start_step + self._steps_here

    def known_checkpoints(self) -> tuple[tuple[int | None, str], ...]:
        """(step, path) of every save the journal knows, oldest first."""
        return self.story.read().checkpoints

    @property
    def waits_for_first_step(self) -> bool:
        """Whether this launch has taken no step yet."""
        return not self._stepped

    @property
    def off(self) -> bool:
        """Whether the guard was switched off for this launch."""
        return self.options.mode is Mode.OFF

    # ---- at save -------------------------------------------------------------------------------------------------

    def after_save(self, directory: Path, *, save_seconds: float | None = None) -> None:
        """The framework has saved: fingerprint memory, manifest last, one journal entry. Never raises.

        `save_seconds`: how long the save blocked training, where the adapter saw its beginning.
        """
        if self.off:
            return
        try:
            root = checkpoint_root(directory)
            self.sealer.seal(root, self.describe(), save_seconds)
            self.batches.after_save(str(root))
        except Exception as problem:  # noqa: BLE001 a save that succeeded must not kill the run through its guard
            text = f"`{directory}` was saved but could not be sealed ({reason_of(problem)}); training goes on"
            self.story.say("save", text)

    def describe(self) -> Memory:
        """Memory as it is now, for a checkpoint that is being saved; `ranks` holds this rank alone."""
        self.carrying.put_back()
        live = self._live()
        memory = fingerprint_memory(live, lr_source=self._witness.source, recent_lrs=tuple(self._recent))
        if memory.next_lrs is not None:
            self._witness = self._witness.predict(memory.next_lrs)
        step = self.step if memory.step is None else memory.step
        return self.carrying.add_to(replace(memory, step=step, training=self._modes), live)

    # ---- at load -------------------------------------------------------------------------------------------------

    def before_load(self, directory: Path, checks: Sequence[Check] = (), memory: Memory | None = None) -> None:
        """Files first: a refusal here comes before a byte of state has been replaced.

        `checks` are the adapter's own, `memory` is what it found inside the checkpoint where that has no manifest.
        """
        if self.off:
            return
        self.sealer.finish()
        self.ruling.tell(())  # no rank looks for a manifest that the main process is still writing
        root = checkpoint_root(directory)
        found = guarded(lambda: self._check_before_load(root, memory))
        self.ruling.settle([*checks, *found], "before load", root)
        self._loading = True

    def _check_before_load(self, root: Path, memory: Memory | None) -> list[Check]:
        self._objects_before = object_digests(self._observe())
        contract, memory = self._contract(), memory or read_memory(root)
        self.begun.expectation = self._expect(root, memory, contract)
        if self.ranks.rank != 0:
            return []  # one rank reads files and journal, all hear the verdict
        history = self.story.read()
        known = None if self.begun.expectation.contract else history.digests.get(str(root))  # a rollback edits files
        files = [*check_files(root), *check_digest(root, known)]
        return [*files, *check_contract(contract, root, history), *check_run_state(root, memory, history)]

    def after_load(self, directory: Path, *, generators: bool = True) -> None:
        """Memory next: everything the manifest or contract promises, on every rank.

        `generators` False: the framework restores them later, or never.
        """
        if self.off:
            return
        self._loading = False
        self.begun.loaded_from = checkpoint_root(directory)
        self.ruling.settle(guarded(self._check_after_load), "after load", self.begun.loaded_from)
        if generators:
            self.generators_restored()

    def generators_restored(self) -> None:
        """The framework has put the random generators back, and nothing has drawn from them yet."""
        if self.off or self.begun.expectation is None:
            return
        expectation, rank = self.begun.expectation, self.ranks.rank
        found = Memory(ranks=(RankDigest(rank=rank, rng=rng_digests()),), topology=self._observe().topology)
        self.ruling.settle(
            guarded(lambda: check_generators(expectation, found, rank=rank)), "after load", self.begun.loaded_from
        )

    def load_failed(self, problem: BaseException) -> None:
        """The framework's own load raised on this rank: the others must hear of it instead of waiting for ever."""
        self._loading = False
        if not self.off and self.ranks.world_size > 1:
            where = f"rank {self.ranks.rank}"
            self.ruling.tell([failed("load", "F2", found=reason_of(problem), where=where)])

    def _check_after_load(self) -> list[Check]:
        expectation = self.begun.expectation or Expectation(basis="none")
        live = self._live()
        found = fingerprint_memory(live)
        self._entry = LoadedState(
            buffers=found.ranks[0].buffers,
            frozen=found.frozen,
            objects=found.objects,
            objects_before=self._objects_before,
        )
        self.data.loaded(live.data)
        self.carrying.loaded(self.begun.expectation, live)
        return check_memory(expectation, found, rank=live.rank)

    def _before_first_batch(self) -> None:
        """Running statistics move with this batch. A plain loop says nothing of its loads: what it meets it has loaded."""
        if self.off or not (self._entry or self.begun.state_loaded):
            return
        live = self._observe()
        entry = self._entry or LoadedState(frozen=frozen_parameters(live))
        self._entry = replace(entry, buffers=buffers_digest(live))

    def state_loaded(self, memory: Memory | None) -> None:
        """A plain loop is loading an optimizer state; `memory` is what travelled in it. Compared at the first step."""
        if self.off:
            return
        self.begun.state_loaded = True
        contract, step = self._contract(), memory.step if memory else None
        bound = contract if contract is not None and step is not None and contract.step == step else None
        self.begun.expectation = self._expectation(memory, bound)
        self.carrying.loaded(self.begun.expectation, self._observe())

    def prepared(self) -> None:
        """The framework has new objects, maybe the loader that a rollback wants changed."""
        if not self.off:
            self.carrying.move_data(self._observe())

    # ---- the first step, and the fifty after it --------------------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """Called before every optimizer step; checks once, then watches the LR. None: an engine's whole step."""
        if self._loading or (self._stepped and not self.ruling.refusal and not self._is_first(optimizer)):
            return
        if not self._stepped or self.ruling.refusal:
            if not self._concerns(optimizer):
                return
            if self.ruling.refusal:
                raise self.ruling.refusal  # caught by somebody who meant to go on
            self._stepped = True
            self._first_step(optimizer)
        if self.off or not self._is_first(optimizer):
            return
        self._steps_here += 1
        self._modes = tuple(bool(model.training) for model in self._models) or None
        lrs = tuple(float(group["lr"]) for known in self._known for group in known.param_groups)
        self._recent.append(lrs)
        self._witness = self._witness.see(lrs)
        if self._tripwire is not None:
            self._trip(lrs)
        resumed = self.begun.loaded_from is not None
        if resumed and self.watch_step is not None and (check := self.watch_step()) is not None:
            self.ruling.refuse([check], f"step {self._steps_here} of this launch", self.begun.loaded_from, local=True)

    def _is_first(self, optimizer: Any) -> bool:
        return optimizer is None or bool(self._known and optimizer is self._known[0])

    def _concerns(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is a step of the guarded training."""
        if optimizer is None:
            return True
        live = self._observe()
        if not live.optimizers and self.begun.loaded_from is not None and self.ruling.refusal is None:
            return True
        return any(optimizer is known for known in live.optimizers) or shares_parameters(optimizer, live.models)

    def _first_step(self, optimizer: Any) -> None:
        if self.off:
            self.ruling.record("off", (), "before the first step")
            self._say_what_is_left_undone()
            return
        first_batches = self.data.gather_first()
        checks = guarded(lambda: self._check_first_step(optimizer, first_batches))
        self.ruling.settle(checks, "before the first step", self.begun.loaded_from)
        if all(check.ok for check in checks):
            self.ruling.record("passed", checks, "before the first step")

    def _say_what_is_left_undone(self) -> None:
        """A guard that is off carries nothing out either."""
        try:
            contract = self._contract() if self.ranks.rank == 0 else None
        except ChronicleError:
            return
        if contract is None or contract.rollback in self.story.read().fulfilled:
            return
        if left := self.carrying.left_undone(contract):
            self.story.say("off", f"switched off: {left}, asked for by rollback {contract.rollback}, is not carried out")

    def _check_first_step(self, optimizer: Any, first_batches: Mapping[int, str]) -> list[Check]:
        live = self._live()
        self._known, self._models = tuple(live.optimizers), tuple(live.models)
        found = fingerprint_memory(live)
        expected = self.begun.expectation.memory if self.begun.expectation else None
        # an optimizer without counters (SGD) does not say where it stands: what was loaded does
        self.begun.start_step = next((memory.step for memory in (found, expected) if memory and memory.step is not None), 0)
        if found.next_lrs is not None:
            self._witness = self._witness.predict(found.next_lrs)
        checks = check_identity(live, optimizer)
        if not self._expectation(None, None).accepts("world_size"):
            checks += check_ranks(self._asked_ranks, self.ranks.world_size)
        if self.begun.loaded_from is None:
            checks += self._check_unseen_load(found)
        checks += self.carrying.first_step(self.begun.expectation, live, self.begun.start_step)
        self.begun.carried = self.carrying.carried
        if self.begun.expectation is None:
            return checks
        checks += check_memory(self.begun.expectation, found, rank=live.rank, at_first_step=True)
        checks += check_mode(self.begun.expectation, found)
        if self._entry is not None:
            checks += check_entry(self.begun.expectation, self._entry, found, rank=live.rank)
        checks += self._check_newest()
        checks += self.data.check(live.data, first_batches)
        own = forecast_lrs(live.optimizers, live.schedulers, NUM_TRIPWIRE_STEPS)
        self._tripwire = LrTripwire.after(self.begun.expectation, found, own)
        return checks

    def _check_unseen_load(self, found: Memory) -> list[Check]:
        """No adapter saw a checkpoint: the trainer loads by itself, or nothing was loaded, which only a first launch may.

        A trainer that stands at the step of a checkpoint in the journal is held to that checkpoint.
        """
        expectation, contract = self.begun.expectation, self._contract()
        if self.begun.state_loaded and (self.options.fresh_start or (expectation and expectation.memory)):
            return []  # what memory held came along in the state itself
        history = self.story.read()
        pending = contract if contract is not None and contract.rollback not in history.fulfilled else None
        if self.options.fresh_start or (pending is None and not history.checkpoints):
            return []
        step = found.optimizer_steps[1] if found.optimizer_steps else 0
        root = next(
            (Path(path) for saved, path in reversed(history.checkpoints) if step and saved == step and path), None
        )
        memory = None if root is None else read_memory(root)
        if root is None or memory is None:
            is_main = self.ranks.rank == 0
            return check_fresh_start(found, history, pending) if is_main and not self.begun.state_loaded else []
        self.begun.loaded_from, self.begun.expectation = root, self._expect(root, memory, contract)
        self.carrying.loaded(self.begun.expectation, self._observe())
        return [*check_files(root), *check_contract(contract, root, history)] if self.ranks.rank == 0 else []

    def _check_newest(self) -> list[Check]:
        """Before the first step and not at the load: a script that only evaluates may load what it likes."""
        root, expectation = self.begun.loaded_from, self.begun.expectation
        if root is None or expectation is None or self.ranks.rank != 0 or expectation.accepts("checkpoint"):
            return []
        return check_newest(expectation.memory, root, self.story.read(), expectation.contract)

    def _trip(self, lrs: tuple[float, ...]) -> None:
        assert self._tripwire is not None
        position = self._tripwire.position + 1
        check = self._tripwire.feed(lrs)
        if self._tripwire.done:
            self._tripwire = None
        if check is not None:
            self.ruling.refuse([check], f"step {position} of this launch", self.begun.loaded_from, local=True)

    # ---- small readings --------------------------------------------------------------------------------------------

    def _live(self) -> LiveState:
        live = self._observe()
        live.rank = self.ranks.rank
        if self.options.step is not None:
            live.step = self.options.step()
        if self.options.data_state is not None:
            live.data = self.options.data_state()
        return live

    def _contract(self) -> Contract | None:
        return read_contract(self.story.paths.contract_path) if self.story.paths else None

    def _expect(self, root: Path, memory: Memory | None, contract: Contract | None) -> Expectation:
        bound = contract if contract is not None and same_checkpoint(contract, root) else None
        return self._expectation(memory, bound)

    def _expectation(self, memory: Memory | None, bound: Contract | None) -> Expectation:
        basis = "contract" if bound else ("manifest" if memory else "none")
        accepted = accepted_changes(bound, self.options.accept_change)
        honours = self.options.honours
        return Expectation(basis=basis, memory=memory, contract=bound, accepted=accepted, by_script=honours)
