"""One process under guard: a save, a load, the first optimizer step, and the LR of the fifty steps after it.

Adapters call these methods. What is compared is in `first_step.py` and `load.py`, how a save is recorded in `save.py`, and
how failed checks become a refusal in `verdict.py`. Only a refusal is ever raised into training: an error of the guard itself is
recorded and said once (`contained`), and the run is unverified from then on.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import GuardAttached, Incident
from chronicle.launch.pulse import PulseWriter
from chronicle.resume.allowed import AS_FIRST_PASS, SPLIT, leave_open
from chronicle.resume.batch_reader import FirstBatch, check_revisions, has_decoder
from chronicle.resume.batch_record import LastFrames
from chronicle.resume.batches import Hears, is_call
from chronicle.resume.checks.check import Check, Outcome, attempt, failed, noted
from chronicle.resume.checks.memory import PARTS
from chronicle.resume.checks.run import drives, shares_parameters
from chronicle.resume.checks.tripwires import NUM_TRIPWIRE_STEPS, LrTripwire, LrWatch
from chronicle.resume.contract import (
    Mode,
    Options,
    effective_options,
    launch_number,
    requested_ranks,
    wants_batch_text,
)
from chronicle.resume.data import NO_STEP_SEEN, DataWatch
from chronicle.resume.envelope import Breach, Envelope
from chronicle.resume.envelope.breach import NOT_FINITE, BreachKind
from chronicle.resume.faults import Containment, Faults, last_resort, reason_of, shield
from chronicle.resume.fingerprint import LiveState, Parts, fingerprint_memory, optimizer_steps
from chronicle.resume.first_gradient import NAME as GRADIENT
from chronicle.resume.first_gradient import FirstGradient
from chronicle.resume.first_step import check_first_step
from chronicle.resume.honours import Honours, has_fixed_order
from chronicle.resume.horizon import ABOUT_LRS, SCHEDULE
from chronicle.resume.journal import GuardJournal, find_run_dir
from chronicle.resume.learning_rate import a_batch_entered, forecast_lrs, number
from chronicle.resume.load import Loads
from chronicle.resume.memory import OTHERS, LrRow, Memory
from chronicle.resume.moving import Moving, facts_of_buffers
from chronicle.resume.prints import Gradient, StepPrints, is_captured
from chronicle.resume.records import Records
from chronicle.resume.reference import LR, Reference
from chronicle.resume.rehearsal import asked_of, hold_after_save
from chronicle.resume.save import Sealer, checkpoint_root
from chronicle.resume.self_report import SelfReport
from chronicle.resume.trained import TrainedWatch
from chronicle.resume.twice import StepTwice
from chronicle.resume.unregistered import Unregistered
from chronicle.resume.verdict import Ranks, StartingPoint, Verdicts, run_checks
from chronicle.resume.written import Head, heads_of, say_other_weights

NUM_RANKS_COMPARED = 64  # between saves


class GuardSession:
    """State of the guard in one process. `observe`, given by the adapter, returns the objects in use right now."""

    def __init__(
        self,
        observe: Callable[[], LiveState],
        options: Options,
        *,
        environ: Mapping[str, str] = os.environ,
        ranks: Ranks | None = None,
        watch_step: Callable[[], Check | None] | None = None,
        before_change: Callable[[], None] | None = None,
        gradients_later: bool = False,
        numbered: Callable[[], int | None] | None = None,
    ) -> None:
        """`watch_step`: what else an adapter looks at before every step. `before_change`: what it must do before memory
        changes. `gradients_later`: the backward pass runs inside the step, and it calls `gradient_ready`. `numbered`: the step
        that is taken, as the framework counts."""
        self._observe: Callable[[], LiveState] = lambda: self._with_named(observe())
        self._retired = False
        self.options = effective_options(options, environ)
        self.ranks = ranks or Ranks()
        self._requested = requested_ranks(environ)
        run_dir, origin = find_run_dir(options.run_dir, environ, Path.cwd())
        self.journal = GuardJournal(run_dir, launch=launch_number(environ), rank=lambda: self.ranks.rank)
        if run_dir is None:
            self.journal.say("run", f"no run directory ({origin}): verdicts are not recorded")
        self.faults = Faults(self.journal, lambda: self.step)
        self.sealer = Sealer(
            self.ranks, self.journal, self.faults.record, lambda *found: self.envelope.compare_replicas(*found)
        )
        if self.journal.launch is not None and not self.off and environ.get("RANK", "0") == "0":
            self.journal.write(GuardAttached(run_id=self.journal.run_id), step=None, title="guard attached")
        self.start = StartingPoint()
        self.verdicts = Verdicts(self.ranks, self.journal, self.options, self.start, self.faults)
        named = environ.get("CHRONICLE_LAUNCH_DIR")
        launch_dir = Path(named) if named and not self.off else None
        paths = None if self.off else self.journal.paths
        rank, record = self.ranks.rank, self.faults.record
        step, world_size = (lambda: self.step), (lambda: self.ranks.world_size)

        trained, models = (lambda: (self.step, self._observe().optimizers)), (lambda: self._observe().models)
        self.prints = StepPrints(
            launch_dir, lambda: self.ranks.rank, world_size, trained, models, self._prints_failed, environ=environ
        )
        self._printing = Containment(self._prints_failed)
        self._numbered = numbered or step
        self.first_batch = FirstBatch(self.journal, self.options.tokenizer, with_text=wants_batch_text(environ))
        self.frames = LastFrames(launch_dir, rank)

        self.first_gradient = FirstGradient(
            None if paths is None else paths.gradients_dir, rank, world_size, models, lambda: self._observe().averages,
            moved_otherwise=self._moved_otherwise, went_wrong=self._went_wrong, lost=partial(record, "gradient"),
        )  # fmt: skip
        self._checks = self.options.check_steps > 0 and not self.off
        self.data = DataWatch(
            self.options, self.journal, self.ranks, self.start, step, self._before_first_batch, self.contained,
            Hears(
                self._enters, self._called if self._checks else None, self._works, self._calibrates, self._look_at,
                partial(record, "batch"),
            ),
            told=self.first_gradient.batch, failed=record, look_for_steps=self._look_for_steps,
        )  # fmt: skip
        self.trained = TrainedWatch()
        self.batches = self.data.batches
        self.twice = StepTwice(
            self.options.check_steps, self.journal, self.ranks, self.batches.unheard, self._check_failed
        )
        self._checking = Containment(self._check_failed)

        self.report = SelfReport(self.ranks, environ)
        self.honours = Honours(self.options.honours)
        self.reference = Reference(None if paths is None else paths.sequels_dir, rank, record)
        self.moving = Moving(None if paths is None else paths.sequels_dir, rank)
        self.unregistered = Unregistered(self.journal)
        atexit.register(shield(self.unregistered.settle, partial(record, "exit")))
        self.records = Records(None if paths is None else paths.states_dir, rank)
        kept = (self.reference, self.moving, self.records)
        parts = (self.options, self.journal, self.ranks, self.start, self.data, self.honours)
        self.loads = Loads(*parts, *kept)
        self.envelope = Envelope(
            observe, self.journal, step, self.ranks,
            share=lambda topic, value, write: self.sealer.share(topic, value, write, at_most=NUM_RANKS_COMPARED),
            contained=self.contained,
            lr_is_ours=lambda: self.honours.used_lr is not None,
            way_out=self._way_out, off=self.off,
        )  # fmt: skip
        self._watch_step, self._before_change, self._gradients_later = watch_step, before_change, gradients_later
        self.engine_steps = False  # steps are announced by a DeepSpeed engine, not by torch's hook
        self.pulse: PulseWriter | None = None  # from the first step on: what the supervisor sees of this rank
        self._environ = environ
        self._hold = asked_of(environ).hold  # of a rehearsal
        self._saved_steps: list[int] = []  # of this launch, newest last
        self._stepped = False  # since the latest load
        self._ever_stepped = False  # ever
        self._loading = False
        self._training = False  # the framework said that it trains from the load
        self._joint = False  # every rank takes part in the load, so that they may talk to each other
        self._identity: Mapping[str, Any] = {}  # of the state that was described last
        self._described: tuple[int, Memory] | None = None  # steps of this launch, memory then
        self._heads: Mapping[str, Head] = {}  # of the weights, then
        self._told_weights = False  # that a save holds others: once a launch
        self._modes: tuple[bool, ...] | None = None  # of the models, at the last optimizer step
        self._models: tuple[Any, ...] = ()
        self._steps_here = 0
        self._goes_on_everywhere = False  # every rank began with the batch that followed the save
        self._known: tuple[Any, ...] = ()  # the guarded optimizers, from the first step on
        self._others: set[str] = set()  # classes of optimizers that are not guarded and step the same parameters
        self._counted: Any = None  # the optimizer whose steps are counted
        self._lr_watch = LrWatch()

    def steps_by_engine(self) -> None:
        """Steps are announced by a DeepSpeed engine, which takes the gradients away."""
        self.engine_steps = True
        self.first_gradient.come_by_hooks()

    @property
    def step(self) -> int | None:
        """Optimizer steps completed, as far as the guard knows without a transfer from the device."""
        if self.start.start_step is None:  # nothing was trained since the load
            loaded = self.start.memory if self.start.resumed else None
            return None if loaded is None else loaded.step
        return self.start.start_step + self._steps_here

    @property
    def waits_for_first_step(self) -> bool:
        """Whether no step was taken yet, in this launch or since its latest load."""
        return not self._stepped

    @property
    def has_begun(self) -> bool:
        """Whether a batch of the training entered the model, or a step was taken, in this launch or since its latest load."""
        return self._stepped or self.batches.has_seen

    @property
    def stepped_unseen(self) -> bool:
        """Whether the optimizers' counters are beyond what was loaded, or beyond the one step that allocates their state."""
        if self._stepped:
            return False
        taken, memory = optimizer_steps(self._observe().optimizers), self.start.memory
        loaded = 1 if not self.start.resumed else memory.step if memory else None
        return loaded is not None and taken is not None and taken[1] > loaded

    @property
    def off(self) -> bool:
        """Whether the guard was switched off for this launch."""
        return self._retired or self.options.mode is Mode.OFF

    def contained(self, where: str) -> Containment:
        """A context for code of the guard: an error in it is recorded and never raised into training; a refusal is."""
        return self.faults.contained(where)

    def _enters(self, batch: Any) -> None:
        """A micro-batch is about to enter the model."""
        a_batch_entered()
        self.first_gradient.enters()
        if self.moving.awaits_batch and not is_captured():
            with self.contained("buffers"):
                self.moving.enters(self._observe())
        with self._printing:
            self.prints.enters(batch)

    def _called(self, model: Any, args: Any, kwargs: Any) -> None:
        """A micro-batch enters this model."""
        if self.twice.is_on:
            with self._checking:
                done = self.step
                self.twice.enters(None if done is None else done + 1, self._observe(), model, args, kwargs)

    def _check_failed(self, problem: Exception) -> None:
        """An error of the check of steps: it is recorded once, and no more steps are taken twice."""
        self.faults.record("check of steps", problem)
        last_resort(lambda _: self.twice.end(), problem)

    def _prints_failed(self, problem: Exception) -> None:
        """An error of the prints: it is recorded once, and no more steps are printed."""
        self.faults.record("step print", problem)
        last_resort(lambda _: self.prints.end(), problem)

    # ---- save ----------------------------------------------------------------------------------------------------

    def after_save(
        self,
        directory: Path,
        *,
        save_seconds: float | None = None,
        before: Mapping[str, tuple[int, int]] | None = None,
        begun: Memory | None = None,
        is_of_now: bool = True,
    ) -> None:
        """The framework has saved: fingerprint memory, write the manifest and one journal entry. Never raises.

        `save_seconds`: how long the save blocked training, and `before`: the files that lay there, where the adapter saw its
        beginning. `begun`: memory when the save began (`state_taken`), where training went on meanwhile. `is_of_now`: what was
        saved was taken since the last step.
        """
        if self.off:
            return
        with self.contained("save"):
            root = checkpoint_root(directory)
            self.unregistered.written(root)
            try:
                self.sealer.seal(root, self.describe() if begun is None else begun, save_seconds, before)
                if begun is None and is_of_now:
                    self.weights_written(root)
                if begun is None:
                    self.state_written()
                self.report.saved(self._observe(), self.step if begun is None else begun.step)
            except Exception as problem:
                text = f"`{directory}` was saved, but its manifest could not be written ({reason_of(problem)})"
                self.journal.say("save", f"{text}; training goes on")
                raise

    def weights_written(self, root: Path) -> None:
        """The state that was described last lies at `root`, a directory or a file: are its weights those of memory?"""
        kept, step = self._heads, self._identity.get("step")

        def compare() -> None:
            text = say_other_weights(root, kept)
            if text and not self._told_weights:
                self._told_weights = True
                self.journal.say("weights of the save", text)
                event = Incident(kind="save-differs", tier="warn", text=text, onset_step=step, launch=self.journal.launch)
                self.journal.write(event, step=step, title=f"warn: save-differs: {text}")

        if kept:
            self.sealer.later(compare)

    def _works(self) -> None:
        """A forward pass begins, or a save is done."""
        if self.pulse is not None:
            self.pulse.sign()

    def state_taken(self) -> Memory:
        """Memory now, which is being written while training goes on; what follows is noted as after any save."""
        memory = self.describe()
        self.state_written()
        return memory

    def state_written(self) -> None:
        """The state that was described last is written: a resume is asked for the batches and the gradient that follow it."""
        self._works()
        self.data.after_save()
        self.trained.shapes.saved()
        if self._described is not None and self._described[0] == self._steps_here:
            self.batches.settle()
            saved = self._described[1]
            self.first_gradient.saved(self.identity, saved.ranks[0].rng)
            self.reference.saved(saved)
            with self.contained("buffers"):
                self.moving.saved(self.identity, self._observe())

    def describe(self, seen: str | None = None) -> Memory:
        """Memory as it is now, for a checkpoint that is being saved; `ranks` holds this rank alone.

        `seen`: the position in the data at the save, when that was earlier than now.
        """
        with self.contained("steps"):
            self._look_for_steps()
        self.honours.restore_lrs()
        live = self._live()
        self._lr_watch.knows(live.schedulers)
        witness = self._lr_watch.witness
        memory = fingerprint_memory(live, lr_source=witness.source, recent_lrs=tuple(self._lr_watch.recent))
        self._lr_watch.foretell(memory.next_lrs)
        step = self.step if memory.step is None else memory.step
        if not self._identity or self._identity["step"] != step:
            shared = self.data.record_id if self.ranks.world_size > 1 else ""
            self._identity = self.journal.new_identity(step, shared)
        spoilt = self.envelope.at_save() or _spoilt_moments(memory)
        if not spoilt and step is not None:
            self._saved_steps = [*self._saved_steps[-63:], step]
        own = replace(memory.ranks[0], batches=self.data.position if seen is None else seen)
        with self.contained("buffers"):
            own = replace(own, each_buffer=facts_of_buffers(live.models), moving=self.moving.keys)
        unregistered: Mapping[str, str] = {}
        with self.contained("unregistered state"):
            unregistered = self.unregistered.at_save(live, step)
        with self.contained("options of the parameter groups"):
            self.reference.options.see(live.optimizers)
        found = replace(
            self._with_habits(memory, live),
            step=step,
            training=self._modes,
            identity=self._identity,
            used=self.reference.options.record(),
            spoilt=spoilt,
            ranks=(own,),
            unregistered=unregistered,
            revisions=dict(self.first_batch.says.revisions),
            lr_moved=witness.moved,
            habits=self.reference.habits,
            seen_frozen=self.reference.frozen_now(memory.frozen),
        )
        found = self.honours.add_to(found, live)
        self._described = (self._steps_here, found)
        with self.contained("weights of the save"):
            self._heads = heads_of(live.models) if self.ranks.rank == 0 else {}
        return found

    def _with_habits(self, memory: Memory, live: LiveState, *, since_save: bool = False) -> Memory:
        """With what is trained, and with which optimizers beside the guarded ones."""
        others = {OTHERS: sorted(self._others)} if self._others else {}
        trained: Mapping[str, Any] = {}
        with self.contained("record of what is trained"):
            trained = self.trained.record(live, since_save=since_save)
        return replace(memory, topology={**memory.topology, **others}, trained=trained)

    @property
    def identity(self) -> str:
        """Id of the state that was described last: what the newest checkpoint carries."""
        return str(self._identity.get("id") or "")

    # ---- load ----------------------------------------------------------------------------------------------------

    def before_load(
        self,
        directory: Path,
        checks: Sequence[Check] = (),
        memory: Memory | None = None,
        *,
        training: bool = False,
    ) -> None:
        """Check the files. Where the load is clearly one to train from, a refusal comes before any state has been replaced.

        `checks` are the adapter's own. `memory` is what it read inside a checkpoint that has no manifest. `training`: the
        framework has said that it begins to train. `load.py` says what is refused when.
        """
        if self.off:
            return
        root = Path(directory)
        self._training, self._joint = training, training
        with self.contained("load"):
            self.sealer.finish()
            root = checkpoint_root(directory)
            self._joint = training or (not self._ever_stepped and self.loads.intends_to_train(self._observe()))
        if self._joint:
            self.verdicts.opens()
            self.verdicts.exchange(())  # no rank looks for a manifest that the main process is still writing
        found = run_checks("files", lambda: self.loads.check_before(root, memory, self._observe(), again=self._ever_stepped))
        if self._joint:
            self.loads.opened(None)
            self.verdicts.decide([*checks, *found], "before load", root)
        else:  # no collective: one rank alone may load in order to evaluate
            self.loads.defer([*checks, *found])
        self._loading = True

    def after_load(self, directory: Path, *, generators: bool = True) -> None:
        """Compare memory with the manifest or contract, on every rank.

        `generators` False: the framework restores the random generators later, or never.
        """
        if self.off:
            return
        self._loading, self._identity = False, {}
        with self.contained("load"):
            self.envelope.loaded()
            if not self._joint:
                self.verdicts.opens()
            self.loads.opened(checkpoint_root(directory))
            self._reopen()
        self._judge_load("memory", lambda: self.loads.check_after(self._live()))
        if self._joint and not self._training:
            self.verdicts.decide((), "after load", self.start.loaded_from)  # hear of a rank whose load failed
        if generators:
            self.generators_restored()
        with self.contained("load"):
            if not self._training:
                self.loads.say_pending(trains=bool(self._observe().optimizers))

    def generators_restored(self) -> None:
        """The framework has restored the random generators, and nothing has drawn from them yet: compare them."""
        if not self.off and self.start.expectation is not None:
            self._judge_load("random generators", lambda: self.loads.check_generators(self._observe().topology))

    def _judge_load(self, name: str, checks: Callable[[], list[Check]]) -> None:
        """Refuse what differs where the framework trains from here; else keep it for an optimizer step, if one follows.

        How a batch is split may be set until that step (Lightning's plan for the accumulation acts as an epoch begins).
        """
        found = run_checks(name, checks)
        if self._training:
            later = [check for check in found if not check.ok and check.name in SPLIT]
            self.loads.defer(later)
            found = [check for check in found if check not in later]
            self.verdicts.decide(found, "after load", self.start.loaded_from)
        else:
            for check in found:
                if check.error:
                    self.faults.record(f"check of {check.name} after load", check.error)
            self.loads.defer(found)

    def load_failed(self, problem: BaseException) -> None:
        """The framework's own load raised on this rank: tell the other ranks, which would wait for ever."""
        self._loading = False
        if not self.off and not self._joint:
            self.journal.say("load", f"a load failed ({reason_of(problem)}): whether memory holds one whole state is unknown")
        elif not self.off and self.ranks.world_size > 1:
            where = f"rank {self.ranks.rank}"
            self.verdicts.exchange([failed("load", "F2", found=reason_of(problem), where=where)])

    def state_loaded(self, memory: Memory | None, why: str = "") -> None:
        """A plain loop loads an optimizer state that was saved with `memory`; it is compared at the first step.

        `why`: why it is not known, where it is None.
        """
        if not self.off:
            self._identity = {}
            self.begins()
            self.first_gradient.loaded()
            self.reference.loaded()
            self.moving.loaded()
            self.unregistered.began()
            self.twice.forget()
            with self._printing:
                self.prints.loaded()
            self.start.learn(state_loaded=True, expectation=None, no_basis=why)
            with self.contained("load"):
                self.envelope.loaded()
                self.loads.state_loaded(memory, self._observe())

    def attached_late(self, why: str) -> None:
        """State was loaded, or steps were taken, before the guard was there; `why` says what shows it."""
        self.start.learn(state_loaded=True, no_basis=f"{why} when `attach` was called: call it before the load")

    def lost(self, where: str, problem: BaseException) -> None:
        """An adapter failed and could not tell of a load or a step: what is in memory is not known any more.

        Nothing is compared with an earlier expectation, so nothing is refused because of this error. The next load is
        checked again.
        """
        self.faults.record(where, problem)
        self._forget(where, f"the guard failed at its {where} ({reason_of(problem)})")

    def _forget(self, where: str, why: str) -> None:
        """Drop every expectation: what is pending is not judged, and the launch is unverified."""
        self._loading = False
        self._lr_watch.arm(None)
        self.start.learn(state_loaded=True, expectation=None, no_basis=why)
        self.loads.forget()
        if where == "step" and not self._stepped and not self.off:
            self._stepped = True  # a later step would compare what training has changed
            with self.contained("verdict"):
                self.verdicts.conclude((), "before the first step")

    def _look_for_steps(self, surely: bool = False) -> None:
        """Whether the optimizer has stepped since the load and no hook saw it: then nothing was compared, which is said.

        `surely`: so many batches have passed that it must have stepped. Else its own counters tell, if it has any.
        """
        if self._stepped or self._loading or self.off or not self.start.resumed or self.start.expectation is None:
            return
        if surely or self.stepped_unseen:
            self._forget("step", NO_STEP_SEEN)

    def guards(self, optimizers: Sequence[Any]) -> bool:
        """Whether steps were taken under guard with one of these optimizers."""
        return any(drives(one, known) for one in optimizers for known in self._known)

    @property
    def retired(self) -> bool:
        """Whether it does nothing more in this launch."""
        return self._retired

    def retire(self) -> None:
        """The guard could not be set up completely, or another session took over: it does nothing more in this launch."""
        self._retired = True
        self.envelope.end(for_good=True)
        self.prints.end()
        self.twice.end()

    def begins(self) -> None:
        """A framework begins to train; when this process has trained before (`fit` or `train` again), all begins anew."""
        if not self.off and self._ever_stepped:
            with self.contained("beginning"):
                self.envelope.loaded()
                self.verdicts.opens()
                self.loads.begins()
                self._reopen()

    def _reopen(self) -> None:
        """The next optimizer step is a first one: tripwires and counts of the state before it no longer hold."""
        self._stepped, self._steps_here, self._counted = False, 0, None
        self._described = None
        self.first_gradient.loaded()
        self.reference.loaded()
        self.moving.loaded()
        self.unregistered.began()
        self.twice.forget()
        with self._printing:
            self.prints.loaded()
        self._lr_watch.begins()
        if self._ever_stepped:
            self.data.restart()

    def prepared(self) -> None:
        """The framework has new objects; one may be the loader whose order a rollback wants changed."""
        if not self.off:
            with self.contained("preparation"):
                live = self._observe()
                if self._known and live.optimizers and not self.guards(live.optimizers):
                    self.begins()  # the next fold or seed
                self.honours.move_data(live)

    def _before_first_batch(self) -> None:
        if not self.off:
            with self.contained("first batch"):
                self.loads.first_batch(self._observe)
                self.trained.first_batch(self._observe())

    def _calibrates(self, training: bool) -> None:
        if not self.off and (training or self.start.resumed) and not self.faults.gave_up("running statistics"):
            with self.contained("running statistics"):
                self.loads.calibrates(self._observe(), training)

    def _look_at(self, batch: Any) -> None:
        """Inputs of the model, in the first micro-batches of a launch and after a save."""
        self.trained.shapes.see(batch)
        if not self.off and not self.first_batch.says.reads_trainer:
            with self.contained("first batch in words"):
                self.first_batch.knows(apart=any(has_decoder(model) for model in self._observe().models))
                self.first_batch.see(*(batch if is_call(batch) else ((batch,), {})))

    # ---- the first step, and the fifty after it ------------------------------------------------------------------

    def before_step(self, optimizer: Any, *, has_closure: bool = False) -> None:
        """Called before every optimizer step; checks once, then watches the LR. None: a whole step of an engine.

        `has_closure`: the step may call the model itself.
        """
        if self._before_change is not None and not self.off:
            with self.contained("save"):
                self._before_change()
        if self._hold and self._saved_steps:
            hold_after_save(self._saved_steps[-1], self._hold, self.prints.end)
        if self._loading or self._retired or (self._stepped and not self.verdicts.refusal and not self._counts(optimizer)):
            return
        if not self._stepped or self.verdicts.refusal:
            concerned = None
            with self.contained("first step"):
                concerned = self._concerns(optimizer)
            if concerned is None and not self.verdicts.refusal:
                self._cannot_judge(optimizer)
                return
            if not (self._did_concern(optimizer) if concerned is None else concerned):
                return
            if self.verdicts.refusal:
                raise self.verdicts.refusal  # the script caught the first one
            self._stepped = True
            self._first_step(optimizer)
        if self.off or self.faults.gave_up("step"):
            return
        is_watched = False
        with self.contained("step"):
            self._watch(optimizer, has_closure=has_closure)
            is_watched = True
        if not is_watched:  # what was counted until now may be wrong: nothing is refused because of it
            self._lr_watch.arm(None)
            self._watch_step = None

    def _watch(self, optimizer: Any, *, has_closure: bool) -> None:
        if not self._counts(optimizer):
            return
        with self.contained("what is trained"):
            self.trained.stepping(self._models)
        if self.unregistered.is_awake:
            with self.contained("unregistered state"):
                self.unregistered.stepping(self._observe())
        if self.reference.is_awaited:
            with self.contained("what follows a save"):
                self.reference.stepping(self._before_next_step)
        self._steps_here += 1
        if not (self._gradients_later or has_closure):  # else the passes of this step are still to come
            self._look_at_buffers()
        if self.pulse is not None:
            self.pulse.step()
        if not self._gradients_later:
            self._see_gradient(optimizer)
            if self._checks:
                self._take_again()
        with self._printing:
            comes = Gradient.TOLD if self._gradients_later else Gradient.AT_END if has_closure else Gradient.READY
            self.prints.stepping(self._numbered(), optimizer, self._models, self._known, gradient=comes)
        self._modes = _modes_of(self._models)
        lrs = self._lrs()
        if lrs != self._lr_watch.last:
            self.reference.options.add(LR, lrs)
        if (check := self._lr_watch.see(lrs)) is not None:
            self._trip(check, lrs)
        if self.start.resumed and self._watch_step is not None and (check := self._watch_step()) is not None:
            self._refuse_here(check)

    def _take_again(self) -> None:
        """The gradients of the step are complete."""
        if self.twice.is_on:
            with self._checking:
                self.twice.stepping(self.step)

    def _look_at_buffers(self) -> None:
        """All forward passes of the step are done."""
        if self.moving.looks_at_steps:
            with self.contained("buffers"):
                self.moving.stepping(self._observe())

    def _lrs(self) -> LrRow:
        return tuple(number(group.get("lr")) for known in self._known for group in known.param_groups)

    def gradient_ready(self, optimizer: Any) -> None:
        """For adapters whose steps run the backward pass inside: the gradient of the step that has begun is complete."""
        if self.off or self.faults.gave_up("step") or not self._counts(optimizer):
            return
        refused = None
        with self.contained("step"):
            for check in self._compare_gradient(optimizer) if self._live().scaler is None else ():
                refused = check if not check.ok else None
                if check.outcome is Outcome.NOTED:
                    self.journal.say(f"noted {check.name}", f"noted: {check.name}: {check.cause}")
            self._see_gradient(optimizer)
            self._see_lr_inside(self._lrs())
            self._look_at_buffers()
            if self._checks:
                self._take_again()
        with self._printing:
            self.prints.gradient_ready(optimizer)
        if refused is not None:
            self._refuse_here(refused)

    def _before_next_step(self) -> Memory:
        """Memory right before the first step after a save; of the digests of its tensors that of the weights."""
        live = self._live()
        found = self._with_habits(fingerprint_memory(live, digests=False), live, since_save=True)
        return replace(found, step=self.step if found.step is None else found.step, training=_modes_of(self._models))

    def _see_lr_inside(self, lrs: LrRow) -> None:
        """The step has begun with the LR of its schedule, as all steps so far; a hook inside the step may set another one."""
        begun = self._lr_watch.last or lrs
        if lrs != begun and self._lr_watch.witness.source == "scheduler" and self.honours.used_lr is None:
            differ = next((a, b) for a, b in zip(begun, lrs, strict=True) if a != b)
            words = f"the step began with {differ[0]}, as scheduled, and a hook inside it set {differ[1]}"
            self.envelope.log.tell(Breach(kind=BreachKind.LR, step=self.step, words=words, seen=self.step))

    def _see_gradient(self, optimizer: Any) -> None:
        if self.first_gradient.is_awaited:
            self.batches.settle()
        self.first_gradient.stepping(self._place_of(optimizer), optimizer, self._lrs())

    def _moved_otherwise(self, words: str, after: int) -> None:
        """A step is another one than in the first pass: `after` steps after the first of this launch."""
        step = self.start.start_step
        first = None if step is None else step + 1 + after
        self.envelope.log.tell(Breach(kind=BreachKind.UPDATE, step=first, words=words, seen=self.step))

    def _went_wrong(self, identity: Mapping[str, Any]) -> str:
        """Which incident the first step after the save of this state belongs to, in words; "" for none.

        The gradient of that step lies in this run's directory, so the launch is one of this journal.
        """
        step = identity.get("step")
        if not isinstance(step, int):
            return ""
        incident = self.journal.read().incident_at(identity.get("launch"), step + 1)
        return "" if incident is None else f"belongs to an incident ({incident.kind} since step {incident.onset_step})"

    def _compare_gradient(self, optimizer: Any) -> Iterator[Check]:
        if not self._goes_on_everywhere:
            return iter(())
        self.batches.settle()
        expectation, place = self.start.expectation, self._place_of(optimizer)
        return attempt(GRADIENT, "M6", lambda: self.first_gradient.compare(expectation, place, optimizer))

    def _place_of(self, optimizer: Any) -> int:
        """Which of the guarded optimizers this is; -1 for a whole engine, whose gradients cannot be reached."""
        known = enumerate(self._known)
        return -1 if optimizer is None else next((i for i, one in known if drives(optimizer, one)), -1)

    def _counts(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is counted: that of the first guarded one, or of one that shares its groups."""
        if optimizer is None or optimizer is self._counted:
            return True
        if self._counted is None and self._known and drives(optimizer, self._known[0]):
            self._counted = optimizer
            return True
        return False

    def _concerns(self, optimizer: Any) -> bool:
        """Whether a step of this optimizer is a step of the guarded training."""
        if optimizer is None:
            return True
        live = self._observe()
        if not live.optimizers and not live.models and self.start.loaded_from is not None and self.verdicts.refusal is None:
            return True  # the load came before anything was prepared, and loaded nothing
        return any(optimizer is known for known in live.optimizers) or shares_parameters(optimizer, live.models)

    def _did_concern(self, optimizer: Any) -> bool:
        """Whether this optimizer was guarded when the launch was refused; for a moment at which nobody can look."""
        return optimizer is None or not self._known or any(optimizer is known for known in self._known)

    def _cannot_judge(self, optimizer: Any) -> None:
        """The guard failed to find out whether a step is the first of its training: nothing pending is judged on it."""
        if self.ranks.world_size > 1:  # the other ranks ask for this one's report, and a refusal of theirs is one
            with self.contained("first step"):
                self.data.gather()
            self.verdicts.decide((), "before the first step", self.start.loaded_from)
        where, error = self.faults.found[-1] if self.faults.found else ("first step", "it is not known why")
        self._forget("step", f"the guard failed at its {where} ({error})")

    def _first_step(self, optimizer: Any) -> None:
        moment = "before the first step"
        if self.off:
            with self.contained("first step"):
                self.verdicts.switched_off(moment)
                self._say_what_is_not_applied()
            return
        first_batches: Sequence[tuple[int, Check]] = ()
        with self.contained("first step"):
            first_batches = self.data.gather()
            equal = sum(check.outcome is Outcome.EQUAL for _, check in first_batches)
            self._goes_on_everywhere = self.ranks.world_size == 1 or equal == self.ranks.world_size
        # a launch that loaded nothing has nothing at stake, unless the run has something to resume from
        self.verdicts.recall(self.loads.pending)
        checks = run_checks(
            "memory", lambda: self._check_first_step(optimizer, first_batches), at_stake=self.start.resumed
        )
        self.verdicts.decide(checks, moment, self.start.loaded_from)
        if all(check.ok for check in checks):
            with self.contained("verdict"):
                self.verdicts.conclude(checks, moment)
                if self.first_gradient.seeded_alike(self.start.expectation) and not self.start.again:
                    fixed = has_fixed_order(self._observe())
                    self.data.warn(checks, (self.start.start_step or 0) + 1, fixed_order=fixed)
        self.data.begin()
        with self.contained("pulse"):
            self.pulse = self.pulse or PulseWriter(self.ranks.rank, self._environ)
        with self.contained("first batch in words"):
            self.first_batch.tell(self._observe(), self.start.start_step)
        with self.contained("facts of this launch"):
            self.report.begin(self._observe(), self.first_batch, self.data.first)

    def _check_first_step(self, optimizer: Any, first_batches: Sequence[tuple[int, Check]]) -> Iterator[Check]:
        live = self._live()
        self.loads.look_again(live)
        self._known, self._models = tuple(live.optimizers), tuple(live.models)
        if optimizer is not None and not any(drives(optimizer, known) for known in self._known):
            self._others.add(type(optimizer).__name__)
        self._ever_stepped = True
        self._lr_watch.knows(live.schedulers)
        found, expected, trained = fingerprint_memory(live), self.start.memory, dict[str, Any]()
        with self.contained("record of what is trained"):
            trained = self.trained.begin(live, expected.trained if expected else None)
        found = replace(found, trained=trained)
        # an optimizer without counters (SGD) does not know its step: the loaded memory does
        self.start.learn(start_step=next((m.step for m in (found, expected) if m and m.step is not None), 0))
        self._lr_watch.foretell(found.next_lrs)
        checks = list(
            check_first_step(
                self.loads,
                live,
                found,
                optimizer=optimizer,
                requested=self._requested,
                world_size=self.ranks.world_size,
                first_batches=first_batches,
                same_data=self.options.same_data,
            )
        )
        settled = leave_open(checks)
        with self.contained("first step"):
            settled = self.loads.settle(checks, live, found)
            self.reference.resumes(expected)
            self.moving.resumes(self._known_to_move(expected))
            self.reference.frozen_now(found.frozen)
        yield from settled
        if not self._gradients_later and all(check.ok for check in settled):  # else another gradient is what follows from it
            yield from self._compare_gradient(optimizer)
        if expected is not None:
            yield from check_revisions(expected.revisions, self.first_batch.says.revisions)
        with self.contained("first step"):
            self.reference.options.see(live.optimizers)
            self.loads.trained(live.models)
        if self.start.expectation is None:
            for part, why in found.unknown.items():
                cause = f"it cannot be described, so a resume will not compare it: {why}"
                yield noted(PARTS.get(part, part), "M1", cause=cause)
        else:
            # where the LRs are others and may be, or could not be compared, the promised ones do not hold any more
            excused = (Outcome.NOTED, Outcome.NOT_COMPARED)
            changed = any(check.outcome in excused for check in settled if check.name in (*ABOUT_LRS, SCHEDULE))
            longer = changed or any(check.error for check in settled)
            yield from attempt("learning rate in use", "L1", lambda: self._begin_tripwire(live, found, longer))

    def _known_to_move(self, expected: Memory | None) -> Sequence[str]:
        """What the training that is resumed moves itself: as the checkpoint knew it, and as it was seen after it."""
        saved = expected.of_rank(self.ranks.rank) if expected else None
        return (*saved.moving, *self.moving.after(expected.state_id)) if expected and saved else ()

    def _begin_tripwire(self, live: LiveState, found: Memory, longer: bool) -> Iterator[Check]:
        assert self.start.expectation is not None
        own = None
        if found.next_lrs is not None:
            own = forecast_lrs(live.optimizers, live.schedulers, NUM_TRIPWIRE_STEPS)
        self._lr_watch.arm(LrTripwire.after(self.start.expectation, found, own, longer=longer))
        yield from ()

    def _say_what_is_not_applied(self) -> None:
        """A guard that is off does not apply options of a rollback either."""
        try:
            contract = self.loads.contract() if self.ranks.rank == 0 else None
        except ChronicleError:
            return
        if contract is None or contract.rollback in self.journal.read().fulfilled:
            return
        if options := self.honours.not_by_script(contract):
            self.journal.say("off", f"the guard is off: {options} of rollback {contract.rollback} will not be applied")

    def _way_out(self, breach: Breach) -> str:
        """Where the last batches are, when something is not finite; and the line to type where the weights are spoilt."""
        kept = self.frames.keep(breach.words) if breach.kind in NOT_FINITE else None
        words = [f"the last batches are in `{kept}`" if kept else "", self._line_to_type(breach)]
        return "; ".join(word for word in words if word)

    def _line_to_type(self, breach: Breach) -> str:
        if breach.tier != "propose" or self.journal.paths is None:
            return ""
        run, began = self.journal.paths.run, breach.low if breach.low is not None else breach.step
        known = [step for step in self._saved_steps if began is not None and step <= began - (breach.low is None)]
        if not known and (self.start.loaded_from is not None or self.start.state_loaded):
            known = [self.start.start_step or 0]
        sound = known[-1] if known else None
        if sound is None:
            return f"no sound checkpoint of this launch is known; type: chronicle spikes --run {run}"
        return f"to roll back, type: chronicle rollback --to {sound} --run {run}"

    def _trip(self, check: Check, lrs: LrRow) -> None:
        if not check.ok and self.first_gradient.used_lrs(self._steps_here) == list(lrs):
            check = replace(check, outcome=Outcome.NOTED, cause=f"{check.found} in use: {AS_FIRST_PASS}")
            self._lr_watch.arm(None)  # the forecast is not what the first pass did
        if check.outcome is Outcome.NOTED:
            self.journal.say(f"noted {check.name}", f"noted: {check.name}: {check.cause}")
        else:
            self._refuse_here(check)

    def _refuse_here(self, check: Check) -> None:
        """Refuse on this rank alone: no collective happens between ordinary steps."""
        moment = f"step {self._steps_here} of this launch"
        self.verdicts.refuse([check], moment, self.start.loaded_from, local=True)

    def _with_named(self, live: LiveState) -> LiveState:
        """With the averages and objects that the script named."""
        if not (self.options.averages or self.options.objects):
            return live
        averages, objects = {**live.averages, **self.options.averages}, {**live.objects, **self.options.objects}
        return replace(live, averages=averages, objects=objects)

    def _live(self) -> LiveState:
        live = self._observe()
        said = Parts()  # the script's own functions may fail, for example before its loader exists
        step = live.step if self.options.step is None else said.take("step", self.options.step, None)
        data = live.data if self.options.data_state is None else said.take("data", self.options.data_state, None)
        return replace(live, rank=self.ranks.rank, step=step, data=data, unknown={**live.unknown, **said.unknown})


def _modes_of(models: Sequence[Any]) -> tuple[bool, ...] | None:
    return tuple(bool(model.training) for model in models) or None


def _spoilt_moments(memory: Memory) -> str:
    """Moments that are not finite: the next step makes the weights so."""
    bad = [i for i, group in enumerate(memory.groups) if group.moment_norm is not None and not isfinite(group.moment_norm)]
    return f"weights-not-finite: the moments of parameter group {bad[0]} hold NaN or infinity" if bad else ""
