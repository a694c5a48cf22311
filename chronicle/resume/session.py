"""One process under guard: it hears the events of an adapter, and refuses a training that does not go on from what was saved.

What happens at an event stands here; what is compared is in `first_step.py` and `load.py`, how a save is recorded in `save.py`,
and how failed checks become a refusal in `verdict.py`. Only a refusal is ever raised into training. An error of the guard
itself is recorded and said once (`contained`), and the run is unverified from then on.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.journal.events import GuardAttached
from chronicle.resume.allowed import SPLIT
from chronicle.resume.checks.check import Check, Outcome, failed
from chronicle.resume.contract import Options
from chronicle.resume.data import NO_STEP_SEEN
from chronicle.resume.events import (
    BatchEntered,
    Begins,
    Ended,
    Event,
    Gradient,
    GradientReady,
    Loaded,
    Loading,
    Logged,
    Saved,
    StepBegins,
)
from chronicle.resume.faults import reason_of
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.first_step import FirstStep
from chronicle.resume.lr_in_use import lrs_of
from chronicle.resume.memory import Memory
from chronicle.resume.parts import Parts
from chronicle.resume.rehearsal import asked_of, hold_after_save
from chronicle.resume.save import checkpoint_root
from chronicle.resume.training import Training
from chronicle.resume.verdict import Ranks, run_checks
from rollback.channels import Role, canonical_name, canonical_of


class GuardSession(Parts):
    """The guard of one training in one process. `observe`, given by the adapter, returns the objects in use right now."""

    def __init__(
        self,
        observe: Callable[[], LiveState],
        options: Options,
        *,
        environ: Mapping[str, str] = os.environ,
        ranks: Ranks | None = None,
        gradients_later: bool = False,
        numbered: Callable[[], int | None] | None = None,
    ) -> None:
        """`gradients_later`: the backward pass runs inside the step, and `GradientReady` is told. `numbered`: the step that is
        taken, as the framework counts."""
        super().__init__(Training(observe, options, environ, ranks))
        if self.journal.launch is not None and not self.off and environ.get("RANK", "0") == "0":
            self.journal.write(GuardAttached(run_id=self.journal.run_id), step=None, title="guard attached")
        self._gradients_later, self._numbered = gradients_later, numbered
        self._first_step = FirstStep(self, gradients_later=gradients_later)
        self.engine_steps = False  # steps are announced by a DeepSpeed engine, not by torch's hook
        self._hold = asked_of(environ).hold  # of a rehearsal
        self._is_loading = False
        self._trains = False  # the framework said that it trains from the load
        self._joint = False  # every rank takes part in the load, so that they may talk to each other
        self._in_step = self.contained("step")

    # ---- what an adapter asks -------------------------------------------------------------------------------------

    @property
    def step(self) -> int | None:
        """Optimizer steps completed, as far as the guard knows without a transfer from the device."""
        return self.training.step

    @property
    def has_begun(self) -> bool:
        """Whether a batch of the training entered the model, or a step was taken, in this launch or since its latest load."""
        return self.training.has_stepped or self.batches.has_seen

    @property
    def off(self) -> bool:
        """Whether the guard was switched off for this launch."""
        return self.training.off

    def describe(self, seen: str | None = None) -> Memory:
        """Memory as it is now, for a checkpoint that is being saved. `seen`: the position in the data at the save, when that
        was earlier than now."""
        with self.contained("steps"):
            self._look_for_steps()
        return self.describer.at_save(seen)

    def steps_by_engine(self) -> None:
        """Steps are announced by a DeepSpeed engine, which takes the gradients away."""
        self.engine_steps = True
        self.first_gradient.come_by_hooks()

    def retire(self) -> None:
        """The guard could not be set up completely, or another session took over: it does nothing more in this launch."""
        self.training.retire()
        self.hub.tell(Ended(for_good=True))

    def lost(self, where: str, problem: BaseException) -> None:
        """An adapter failed and could not tell of a load or a step: what is in memory is not known any more.

        Nothing is compared with an earlier expectation, so nothing is refused because of this error. The next load is
        checked again.
        """
        self.faults.record(where, problem)
        self._forget(where, f"the guard failed at its {where} ({reason_of(problem)})")

    # ---- events ---------------------------------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """An adapter tells what happens. Only a refusal is raised."""
        match event:
            case StepBegins():
                self._step_begins(event)
            case GradientReady():
                self._gradient_ready(event.optimizer)
            case BatchEntered():
                self.batches.take(event.batch)
            case Logged():
                self._logged(event)
            case Saved():
                self._saved(event)
            case Loading():
                self._loading(event)
            case Loaded():
                self._loaded(event)
            case Begins():
                self._begins(event)
            case Ended():
                self.sealer.finish()
                self.hub.tell(event)

    def _begins(self, event: Begins) -> None:
        """When this process has trained before (`fit` or `train` again, the next fold or seed), all begins anew."""
        if event.model is not None:
            self.batches.watch(event.model)
        if self.off:
            return
        with self.contained("preparation"):
            live, training = self.training.observe(), self.training
            are_others = bool(training.optimizers and live.optimizers) and not training.guards(live.optimizers)
            if training.has_ever_stepped and (event.says_so or are_others):
                self.verdicts.opens()
                self.loads.begin_anew()
                self._reopen()
            self.honours.move_data(live)

    def _reopen(self) -> None:
        """The next optimizer step is a first one."""
        self.training.reopen()
        self.hub.tell(Loaded(again=self.training.has_ever_stepped))

    def _logged(self, event: Logged) -> None:
        """Into the log of the launch: of a warm-up that the guard applies, the LR that is really used."""
        used = self.honours.used_lr
        if used is not None:
            lr = canonical_of(Role.LR)
            values = {name: used if canonical_name(name) == lr else one for name, one in event.values.items()}
            event = replace(event, values=values)
        event.into(self.log)

    # ---- a save ---------------------------------------------------------------------------------------------------

    def _saved(self, event: Saved) -> None:
        """Fingerprint memory, write the manifest and one journal entry. Never raises."""
        if self.off:
            return
        with self.contained("save"):
            path = None if event.path is None else checkpoint_root(event.path)
            self.unregistered.written(path)
            try:
                memory = event.memory if event.memory is not None else self.describe()
                if event.is_over:
                    self.sealer.record(event, path, memory)
            except Exception as problem:
                text = f"`{event.path}` was saved, but its manifest could not be written ({reason_of(problem)})"
                self.journal.say("save", f"{text}; training goes on")
                raise
            is_of_now = event.is_of_now and self.describer.is_of_now(memory)
            if is_of_now and event.is_over and path is not None:
                self.sealer.compare_weights(path, self.describer.heads, memory.step)
            if path is not None or memory.step is not None:
                self.hub.tell(replace(event, memory=memory, is_of_now=is_of_now))

    # ---- a load ---------------------------------------------------------------------------------------------------

    def _loading(self, event: Loading) -> None:
        """Check the files. Where the load is clearly one to train from, a refusal comes before any state has been replaced."""
        if self.off:
            return
        root = Path(event.directory)
        self._trains, self._joint = event.trains, event.trains
        again = self.training.has_ever_stepped
        with self.contained("load"):
            self.sealer.finish()
            root = checkpoint_root(event.directory)
            self._joint = event.trains or (not again and self.loads.intends_to_train(self.training.observe()))
        if self._joint:
            self.verdicts.opens()
            self.verdicts.exchange(())  # no rank looks for a manifest that the main process is still writing
        found = run_checks(
            "files", lambda: self.loads.check_before(root, event.memory, self.training.observe(), again=again)
        )
        if self._joint:
            self.loads.opened(None)
            self.verdicts.decide([*event.checks, *found], "before load", root)
        else:  # no collective: one rank alone may load in order to evaluate
            self.loads.defer([*event.checks, *found])
        self._is_loading = True

    def _loaded(self, event: Loaded) -> None:
        if event.problem is not None:
            self._load_failed(event.problem)
        elif event.directory is not None:
            self._checkpoint_loaded(event.directory, generators=event.generators)
        elif not self.off:
            self._state_loaded(event)

    def _checkpoint_loaded(self, directory: Path, *, generators: bool) -> None:
        """Compare memory with the manifest or contract, on every rank."""
        if self.off:
            return
        self._is_loading = False
        with self.contained("load"):
            if not self._joint:
                self.verdicts.opens()
            self.loads.opened(checkpoint_root(directory))
            self._reopen()
        self._judge_load("memory", lambda: self.loads.check_after(self.training.live()))
        if self._joint and not self._trains:
            self.verdicts.decide((), "after load", self.start.loaded_from)  # hear of a rank whose load failed
        if generators:
            self.generators_restored()
        with self.contained("load"):
            if not self._trains:
                self.loads.say_pending(trains=bool(self.training.observe().optimizers))

    def generators_restored(self) -> None:
        """The framework has restored the random generators, and nothing has drawn from them yet: compare them."""
        if not self.off and self.start.expectation is not None:
            topology = self.training.observe().topology
            self._judge_load("random generators", lambda: self.loads.check_generators(topology))

    def _judge_load(self, name: str, checks: Callable[[], list[Check]]) -> None:
        """Refuse what differs where the framework trains from here; else keep it for an optimizer step, if one follows.

        How a batch is split may be set until that step (Lightning's plan for the accumulation acts as an epoch begins).
        """
        found = run_checks(name, checks)
        if self._trains:
            later = [check for check in found if not check.ok and check.name in SPLIT]
            self.loads.defer(later)
            found = [check for check in found if check not in later]
            self.verdicts.decide(found, "after load", self.start.loaded_from)
            return
        for check in found:
            if check.error:
                self.faults.record(f"check of {check.name} after load", check.error)
        self.loads.defer(found)

    def _load_failed(self, problem: BaseException) -> None:
        """The framework's own load raised on this rank: tell the other ranks, which would wait for ever."""
        self._is_loading = False
        if self.off:
            return
        if not self._joint:
            self.journal.say("load", f"a load failed ({reason_of(problem)}): whether memory holds one whole state is unknown")
        elif self.ranks.world_size > 1:
            where = f"rank {self.ranks.rank}"
            self.verdicts.exchange([failed("load", "F2", found=reason_of(problem), where=where)])

    def _state_loaded(self, event: Loaded) -> None:
        """A plain loop loads an optimizer state that was saved with this memory; it is compared at the first step."""
        again = self.training.has_ever_stepped
        with self.contained("load"):
            if again:
                self.verdicts.opens()
                self.loads.begin_anew()
                self.training.reopen()
            self.hub.tell(replace(event, again=again))
        self.start.learn(state_loaded=True, expectation=None, no_basis=event.why)
        with self.contained("load"):
            self.loads.state_loaded(event.memory, self.training.observe())

    def _forget(self, where: str, why: str) -> None:
        """Drop every expectation: what is pending is not judged, and the launch is unverified."""
        self._is_loading = False
        self.lrs.arm(None)
        self.start.learn(state_loaded=True, expectation=None, no_basis=why)
        self.loads.forget()
        if where == "step" and not self.training.has_stepped and not self.off:
            self.training.begins_step()  # a later step would compare what training has changed
            with self.contained("verdict"):
                self.verdicts.conclude((), "before the first step")

    def _look_for_steps(self, surely: bool = False) -> None:
        """Whether the optimizer has stepped since the load and no hook saw it: then nothing was compared, which is said.

        `surely`: so many batches have passed that it must have stepped. Else its own counters tell, if it has any.
        """
        if self.training.has_stepped or self._is_loading or self.off:
            return
        if self.start.resumed and self.start.expectation is not None and (surely or self.training.has_stepped_unseen):
            self._forget("step", NO_STEP_SEEN)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _step_begins(self, event: StepBegins) -> None:
        """Before every optimizer step: judges the first one, and watches all."""
        training = self.training
        training.changes()
        if self._hold and self.breaches.saved_steps:
            hold_after_save(self.breaches.saved_steps[-1], self._hold, self.prints.end)
        if not self._is_loading and not training.retired:
            self._take_step(event)
        if not training.off and not self.envelope.off:
            with self.envelope.contained:
                self.envelope.before_step(event)

    def _take_step(self, event: StepBegins) -> None:
        training, optimizer = self.training, event.optimizer
        if (not training.has_stepped or self.verdicts.refusal) and not self._may_be_first(optimizer):
            return
        if not training.has_stepped:
            training.begins_step()
            self._first_step.judge(optimizer)
            self.hub.wake()
        if training.off or not training.is_counted(optimizer):
            return
        checks = None
        with self._in_step:
            checks = self._watch(event)
        if checks is None:  # what was counted until now may be wrong: nothing is refused because of it
            self.lrs.arm(None)
        elif checks:
            self._judge_here(checks)

    def _may_be_first(self, optimizer: Any) -> bool:
        """Whether this is a step of the guarded training, which is refused, or has yet to be judged."""
        concerned = None
        with self.contained("first step"):
            concerned = self._first_step.concerns(optimizer)
        if self.verdicts.refusal:
            if self._first_step.concerned(optimizer) if concerned is None else concerned:
                raise self.verdicts.refusal  # the script caught the first one
            return False
        if concerned is None:
            self._forget("step", self._first_step.cannot_be_told())
        return bool(concerned)

    def _watch(self, event: StepBegins) -> list[Check]:
        training, lrs = self.training, lrs_of(self.training.optimizers)
        gradient = Gradient.READY
        if self._gradients_later:
            gradient = Gradient.TOLD
        elif event.has_closure:
            gradient = Gradient.AT_END
        done = training.step
        number = self._numbered() if self._numbered is not None else done if done is None else done + 1
        checks = self.hub.tell(replace(event, number=number, lrs=lrs, gradient=gradient))
        training.counts()
        if not self._gradients_later:
            step = None if done is None else done + 1
            self.hub.tell(GradientReady(optimizer=event.optimizer, step=step, lrs=lrs, gradient=gradient))
        return checks

    def _gradient_ready(self, optimizer: Any) -> None:
        """The backward pass runs inside the step: the gradient of the step that has begun is complete."""
        training, checks = self.training, list[Check]()
        if self.off or not training.is_counted(optimizer):
            return
        with self._in_step:
            if training.live().scaler is None:
                checks += self._first_step.compare_gradient(optimizer)
            lrs, step = lrs_of(training.optimizers), training.step
            self.hub.tell(GradientReady(optimizer=optimizer, step=step, lrs=lrs, gradient=Gradient.TOLD))
        self._judge_here(checks)

    def _judge_here(self, checks: Sequence[Check]) -> None:
        """Refuse on this rank alone: no collective happens between ordinary steps."""
        for check in checks:
            if check.outcome is Outcome.NOTED:
                self.journal.say(f"noted {check.name}", f"noted: {check.name}: {check.cause}")
            elif not check.ok:
                moment = f"step {self.training.steps_here} of this launch"
                self.verdicts.refuse([check], moment, self.start.loaded_from, local=True)
