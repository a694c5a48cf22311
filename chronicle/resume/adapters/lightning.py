"""Lightning under guard: `Trainer(callbacks=[ChronicleCallback("tr-190")])`; automatic under `chronicle run`.

A Lightning checkpoint is one file, so the description of memory is stored inside it, as this callback's state. Generators are
not part of Lightning's checkpoints and are not compared. The entry point `lightning.pytorch.callbacks_factory` needs no line.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler

from chronicle.recording import start
from chronicle.resume.adapters.hooks import (
    GuardedCallback,
    dtype_of,
    hook_optimizer_steps,
    split_of,
)
from chronicle.resume.batches import watch_loaders
from chronicle.resume.contract import Said, options_from
from chronicle.resume.events import BatchEntered, Begins, GradientReady, Loaded, Loading, Logged, Saved
from chronicle.resume.faults import last_resort, or_else, reason_of, record_without_session, shielded
from chronicle.resume.fingerprint import LiveState, collect_optimizers, steppers_of
from chronicle.resume.honours import keeps_place
from chronicle.resume.learning_rate import BoundScheduler
from chronicle.resume.memory import WHOLE, Memory
from chronicle.resume.patches import around, change_object, is_changed
from chronicle.resume.session import GuardSession
from chronicle.resume.unregistered import hold

TRAINER_SETTINGS = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision", "world_size")


class ChronicleCallback(GuardedCallback, Callback):  # type: ignore[misc]
    """Guard and per-step log of one Trainer. `run`: name or directory of the run; default `CHRONICLE_RUN_DIR`."""

    # the key of this state in a checkpoint's `callbacks`; Lightning requires it to be unique in a Trainer
    state_key = key = "ChronicleCallback"

    @shielded("setup", wrong_use=(TypeError, ValueError))
    def __init__(self, run: str | Path | None = None, **said: Unpack[Said]) -> None:
        self._options = options_from(run, said)
        self._trainer: Any = None
        self._session: GuardSession | None = None
        self._described: Memory | None = None  # of the checkpoint that is being saved
        self._found: Memory | None = None  # description of memory in the checkpoint that is being loaded

    @property
    def session(self) -> GuardSession | None:
        """The guard of this Trainer; None before training begins."""
        return self._session

    @shielded("setup")
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start the guard for training; of several callbacks (one given, one from the entry point) only the first does."""
        others = [c for c in trainer.callbacks if isinstance(c, ChronicleCallback)]
        if stage != "fit" or others[0] is not self:
            return
        self._trainer = trainer
        if self._session is None:
            number: Callable[[], int] = lambda: int(trainer.global_step) + 1  # noqa: E731 of several optimizers all steps count
            self._session = GuardSession(self._observe, self._options, gradients_later=True, numbered=number)
            hook_optimizer_steps(self._session)
        self._session.hear(Begins())
        hold(trainer.callbacks)
        watch_loaders()
        if not is_changed(trainer.save_checkpoint):
            change_object(trainer, "save_checkpoint", around(trainer.save_checkpoint, after=self._record_save))

    @or_else(lambda problem, self: self._undescribed(problem))
    def state_dict(self) -> dict[str, Any]:
        """The description of memory at this save, with the digests of all ranks that arrive within a second."""
        session = self._session
        return {} if session is None or session.off else {"memory": self._describe(session).to_json()}

    def _undescribed(self, problem: Exception) -> dict[str, Any]:
        """After an error the checkpoint says so itself, else its next resume would look for a description."""
        last_resort(lambda problem: self.lost("save", problem), problem)
        return {"memory": {"unknown": {WHOLE: f"the guard failed: {reason_of(problem)}"}}}

    def _describe(self, session: GuardSession) -> Memory:
        memory = session.describe()
        memory = replace(memory, topology={**memory.topology, **_planned_split(self._trainer, memory.topology)})
        self._described, own = memory, memory.ranks[0]
        prefix = session.ranks.publish("lightning", own)
        return memory if session.ranks.rank else replace(memory, ranks=session.sealer.collect_soon(prefix, own))

    @shielded("load")
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Keep the checkpoint's description until everything else is loaded, whichever callback wrote it."""
        states = checkpoint.get("callbacks") or {}
        records = [states[key]["memory"] for key in (ChronicleCallback.key, EnteredCallback.key) if states.get(key)]
        self._found = Memory.from_json(records[0]) if records and isinstance(records[0], Mapping) else None

    def lost(self, where: str, problem: Exception) -> None:
        """One of the methods failed; a load whose description could not be read is not compared."""
        super().lost(where, problem)
        if where == "load":
            self._found = Memory(unknown={WHOLE: f"the guard failed: {reason_of(problem)}"})

    @shielded("load")
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compare: model, loops, optimizers and schedulers are restored."""
        path = trainer.ckpt_path
        if self._session is not None:
            with self._session.contained("settings"):
                start().add_settings("hparams", dict(getattr(pl_module, "hparams", {})))
                start().add_settings("Trainer", {name: getattr(trainer, name, None) for name in TRAINER_SETTINGS})
        if self._session is None or not path:
            return
        self._session.hear(Loading(directory=Path(path), memory=self._found, trains=True))
        self._session.hear(Loaded(directory=Path(path), generators=False))

    @shielded("batch")
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the batch: `training_step` is no forward pass that a hook could see, and may be compiled."""
        if self._session is not None:
            self._session.hear(BatchEntered(batch=batch))

    @shielded("step")
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The gradient is there: Lightning's steps run the backward pass inside, after the guard has looked at the step."""
        if self._session is not None:
            self._session.hear(GradientReady(optimizer=getattr(optimizer, "optimizer", optimizer)))

    @shielded("log")
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write one line to the launch's per-step log."""
        if self._session is not None and trainer.is_global_zero:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
            lr = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None
            self._session.hear(Logged(step=trainer.global_step, values={"loss": loss, "lr": lr}))

    @shielded("save")
    def _record_save(self, result: Any, given: Any, filepath: Any, *_: Any, **__: Any) -> None:
        described, self._described = self._described, None
        if self._session is not None and described is not None:
            self._session.hear(Saved(path=Path(filepath).absolute(), memory=described))

    def _observe(self) -> LiveState:
        trainer = self._trainer
        module, feed = trainer.lightning_module, _only_loader(trainer.train_dataloader)
        return LiveState(
            models=(module,),
            optimizers=collect_optimizers(trainer.optimizers),
            schedulers=tuple(_bind(config) for config in trainer.lr_scheduler_configs),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            topology={
                "world_size": int(trainer.world_size),
                "accumulation": int(trainer.accumulate_grad_batches),
                "precision": str(trainer.precision),
                "sharding": type(trainer.strategy).__name__,
                **split_of(
                    getattr(trainer.train_dataloader, "batch_size", None),  # of a single loader that makes its batches itself
                    int(trainer.accumulate_grad_batches),
                    int(trainer.world_size),
                ),
                "dtype": dtype_of((module,)),
            },
            arguments={
                "gradient_clip_val": trainer.gradient_clip_val,
                "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
            },
            averages=_averages(trainer.callbacks),
            objects=_stopping(trainer.callbacks),
            feed=feed,
            loaders=(feed,) if keeps_place(feed) else (),  # of others Lightning keeps the place
            reading=feed if keeps_place(feed) else None,
            step=int(trainer.global_step),
            steppers=steppers_of(trainer.optimizers),
        )


def _averages(callbacks: Any) -> dict[str, Any]:
    """The averaged models of `WeightAveraging` and its subclasses."""
    found = {type(one).__name__: getattr(one, "_average_model", None) for one in callbacks}
    return {name: average for name, average in found.items() if average is not None}


def _stopping(callbacks: Any) -> dict[str, Any]:
    """Early stopping: its best score and its patience. Other callbacks may change between the save and the first step."""
    return {type(one).__name__: one for one in callbacks if isinstance(one, EarlyStopping)}


def _only_loader(loaders: Any) -> Any:
    """The loader that is trained from; None when there are several."""
    if isinstance(loaders, (list, tuple, dict)):
        several = tuple(loaders.values()) if isinstance(loaders, dict) else tuple(loaders)
        return several[0] if len(several) == 1 else None
    return loaders


def _planned_split(trainer: Any, topology: Mapping[str, Any]) -> dict[str, int]:
    """The accumulation that `GradientAccumulationScheduler` sets for the step after this save; {} without such a plan.

    It sets the Trainer's value when an epoch begins, so a save at the end of an epoch finds the old one. A resume in the middle
    of an epoch begins without it (Lightning 2.6): the steps until the next epoch then really take fewer batches.
    """
    plans = [one for one in trainer.callbacks if isinstance(one, GradientAccumulationScheduler)]
    if not plans:
        return {}
    ends = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch and trainer.state.status == "running"
    epoch = int(trainer.current_epoch) + bool(ends)
    now, planned = int(trainer.accumulate_grad_batches), int(plans[-1].get_accumulate_grad_batches(epoch))
    size = topology.get("global_batch")
    return {"accumulation": planned, **({"global_batch": size // now * planned} if isinstance(size, int) else {})}


def _bind(config: Any) -> BoundScheduler:
    """A scheduler stepped per epoch counts as constant in a forecast of optimizer steps."""
    each_step = config.interval == "step" and config.frequency == 1
    return BoundScheduler(scheduler=config.scheduler, unit=1 if each_step else 0)


class EnteredCallback(ChronicleCallback):
    """The callback that the entry point adds; a script may also pass its own."""

    state_key = key = "ChronicleCallback.entered"


@or_else(lambda problem: _unguarded(problem))
def callbacks_factory() -> list[Callback]:
    """Entry point `lightning.pytorch.callbacks_factory`: under `chronicle run` every Trainer gets a guard."""
    if os.environ.get("CHRONICLE_RUN_DIR") or os.environ.get("CHRONICLE_RUN"):
        return [EnteredCallback()]
    return []


def _unguarded(problem: Exception) -> list[Callback]:
    record_without_session("setup", problem)
    return []
