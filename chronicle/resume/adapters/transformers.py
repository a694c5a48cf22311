"""HF Trainer under guard: `Trainer(…, callbacks=[ChronicleCallback("tr-190")])`; automatic under `chronicle run`.

The Trainer loads model, optimizer and scheduler before `on_train_begin` and silently skips what it does not find
(`_load_optimizer_and_scheduler` in 5.23 has no `else`). It restores the generators when the first epoch begins. Callbacks do
not get the path; the guard takes the checkpoint of the step at which the Trainer says it resumes.
"""

import functools
import re
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from chronicle.recording import start
from chronicle.resume.adapters.hooks import GuardedCallback, dtype_of, hook_optimizer_steps, split_of
from chronicle.resume.batch_reader import has_decoder
from chronicle.resume.checks.check import not_compared
from chronicle.resume.contract import Said, options_from
from chronicle.resume.events import Begins, Ended, Loaded, Loading, Logged, Saved
from chronicle.resume.faults import shield, shielded
from chronicle.resume.fingerprint import LiveState, collect_optimizers, steppers_of
from chronicle.resume.honours import keeps_place
from chronicle.resume.learning_rate import BoundScheduler, raw_scheduler
from chronicle.resume.patches import around, change, change_object, release
from chronicle.resume.rehearsal import asked_of
from chronicle.resume.session import GuardSession
from chronicle.resume.unregistered import hold
from rollback.channels import Role, canonical_name, canonical_of

SUMMARY = "train_runtime"  # is in the Trainer's last record
CHECKPOINT_NAME = re.compile(r"checkpoint-([0-9]+)")
_began = [0]  # Trainers that began to train in this process under `chronicle run`


class ChronicleCallback(GuardedCallback, TrainerCallback):  # type: ignore[misc]
    """Guard and per-step log of one Trainer. `run`: name or directory of the run; default `CHRONICLE_RUN_DIR`."""

    @shielded("setup", wrong_use=(TypeError, ValueError))
    def __init__(self, run: str | Path | None = None, **said: Unpack[Said]) -> None:
        self._options = options_from(run, said)
        self._session: GuardSession | None = None
        self._parts: dict[str, Any] = {}
        self._waits_for_generators = False
        self._epochs = 0  # begun since `train`
        self._kind: Mapping[str, Any] = {}  # class and loss function of the Trainer
        self._owner: Any = lambda: None  # the Trainer, as far as it is known
        self._trainer: Any = None  # whose `training_step` is wrapped
        change("Trainer", functools.partial(around, before=shield(begins, lambda problem: self.lost("setup", problem))))

    def belongs_to(self, trainer: Any) -> None:
        """This Trainer has it among its callbacks, and begins to train."""
        self._owner = weakref.ref(trainer)
        hold(trainer.callback_handler.callbacks)

    @property
    def session(self) -> GuardSession:
        """The guard of this Trainer, made when training begins (the process group must exist)."""
        if self._session is None:
            self._session = GuardSession(self._observe, self._options)
            hook_optimizer_steps(self._session)
        return self._session

    @shielded("load")
    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Compare: everything but the generators has been loaded, if anything was."""
        self._parts = {**parts, "args": args, "state": state}
        self._epochs = 0
        session = self.session
        session.hear(Begins(model=parts["model"]))
        if not session.off:
            with session.contained("first batch in words"):
                self._prepare_words(self._owner())
        with session.contained("settings"):
            start().add_settings("TrainingArguments", args.to_sanitized_dict())
            configured = getattr(getattr(parts["model"], "config", None), "to_dict", None)
            start().add_settings("the model's config", {"model": configured()} if configured is not None else {})
        if state.global_step <= 0:
            return
        directory = find_resumed(args, state, session.journal.read().checkpoints)
        # at an epoch's start the loader draws from the generators before the guard could compare them
        mid_epoch = abs((state.epoch or 0.0) - round(state.epoch or 0.0)) > 1e-9
        self._waits_for_generators = mid_epoch and not args.ignore_data_skip
        session.data.goes_on(skips_seen=self._waits_for_generators)
        session.hear(Loading(directory=directory, trains=True))
        session.hear(Loaded(directory=directory, generators=False))

    @shielded("load")
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The resumed epoch had no batch left (a stream without a length): the loader of the next one has drawn a seed."""
        self._epochs += 1
        if self._epochs > 1 and self._waits_for_generators:
            self._waits_for_generators = False
            why = "the resumed epoch had no batch left, and the loader of the next one has drawn from them"
            self.session.loads.defer([not_compared("random generators", "M1", why)])

    @shielded("load")
    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Compare the generators once: the Trainer has restored them and read the first batch."""
        if self._waits_for_generators:
            self._waits_for_generators = False
            self.session.generators_restored()

    @shielded("step")
    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """In a rehearsal: log every step, save after the steps that it asks for, and end after its last one."""
        asked = asked_of()
        if not asked.end:
            return
        control.should_log = True
        if state.global_step in (asked.save, asked.end):
            control.should_save = True
        if state.global_step >= asked.end:
            control.should_training_stop = True

    @shielded("save")
    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Seal the checkpoint that was written."""
        self.session.hear(Saved(path=Path(args.output_dir) / f"checkpoint-{state.global_step}"))

    @shielded("log")
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:
        """Write one line to the launch's per-step log; of the Trainer's last one not the loss, which is the mean of the run."""
        if state.is_world_process_zero:
            lr = canonical_of(Role.LR)
            values = {lr if canonical_name(name) == lr else name: value for name, value in (logs or {}).items()}
            if SUMMARY in values:
                values.pop("train_loss", None)
            self.session.hear(Logged(step=state.global_step, values=values))

    @shielded("exit")
    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Complete the manifests before `train()` returns."""
        if self._trainer is not None:
            release(self._trainer, "training_step")
            self._trainer = None
        self.session.hear(Ended())

    # ---- the first batch in words ------------------------------------------------------------------------------------

    def _prepare_words(self, trainer: Any) -> None:
        """What the Trainer knows beside the batch; its batches are seen in `training_step`, before anything is taken out."""
        args, state, first = self._parts["args"], self._parts["state"], self.session.first_batch
        tokenizer = first.says.tokenizer or self._parts.get("processing_class")
        first.knows(
            tokenizer=tokenizer,
            planned=int(state.max_steps) if state.max_steps > 0 else None,
            apart=has_decoder(self._parts.get("model")),
            precision="bf16" if getattr(args, "bf16", False) else "fp16" if getattr(args, "fp16", False) else "fp32",
        )
        if trainer is not None:
            own = getattr(trainer, "compute_loss_func", None)
            self._kind = {"trainer": type(trainer).__name__, "compute_loss_func": own}
        if trainer is not None and "training_step" not in vars(trainer):
            self._trainer = trainer
            change_object(trainer, "training_step", self._step_seen(trainer.training_step))

    def _step_seen(self, original: Any) -> Any:
        record = self.session.faults.record

        def see(inputs: Any) -> None:
            if not isinstance(inputs, Mapping):
                return
            self.session.first_batch.see((), inputs)
            if "input_ids" in inputs:
                self.session.first_batch.knows(reads_trainer=True)

        def tell() -> None:  # a batch that the model cannot take: what is wrong with it is known
            self.session.first_batch.tell(self._observe(), self._parts["state"].global_step)

        sees = shield(see, lambda problem: record("batch", problem))
        tells = shield(tell, lambda problem: record("first batch in words", problem))

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            sees(inputs)
            try:
                return original(model, inputs, *args, **kwargs)
            except Exception:
                tells()
                raise

        return training_step

    def _observe(self) -> LiveState:
        args, state = self._parts["args"], self._parts["state"]
        scheduler = raw_scheduler(self._parts.get("lr_scheduler"))
        optimizer, model = self._parts.get("optimizer"), self._parts.get("model")
        # with `ignore_data_skip` the Trainer has no position in the data, so none but a loader with its own can skip batches
        loader = self._parts.get("train_dataloader")
        loader = None if args.ignore_data_skip and not keeps_place(loader) else loader
        topology = {
            "world_size": int(args.world_size),
            "accumulation": int(args.gradient_accumulation_steps),
            **split_of(int(args.train_batch_size), int(args.gradient_accumulation_steps), int(args.world_size)),
            "sharding": _sharding(args),
            "dtype": "" if model is None else dtype_of((model,)),
        }
        return LiveState(
            models=() if model is None else (model,),
            optimizers=() if optimizer is None else collect_optimizers((optimizer,)),
            schedulers=(BoundScheduler(scheduler=scheduler),) if scheduler is not None else (),
            topology=topology,
            step=int(state.global_step),
            steppers=() if optimizer is None else steppers_of((optimizer,)),
            loaders=() if loader is None else (loader,),
            reading=loader,
            feed=self._parts.get("train_dataloader"),
            scaler=getattr(optimizer, "scaler", None),  # of Accelerate's wrapper
            arguments={**(vars(args) if hasattr(args, "__dict__") else {}), **self._kind},
        )


def enter(trainer: Any) -> None:
    """Under `chronicle run`: give a Trainer that begins to train the callback, unless the script has given it one.

    A second Trainer of one process (folds, a reward model before the policy) has not forgotten to resume.
    """
    handler = trainer.callback_handler
    if not any(isinstance(callback, ChronicleCallback) for callback in handler.callbacks):
        handler.add_callback(ChronicleCallback(fresh_start=_began[0] > 0))
    _began[0] += 1
    begins(trainer)


def begins(trainer: Any, *_: Any, **__: Any) -> None:
    """This Trainer begins to train: its callback is told whose it is."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ChronicleCallback):
            callback.belongs_to(trainer)


def _sharding(args: Any) -> str:
    """zero<stage>, fsdp or replicated."""
    config = getattr(getattr(args, "hf_deepspeed_config", None), "config", None)
    if config is not None:
        return f"zero{(config.get('zero_optimization') or {}).get('stage', 0)}"
    return "fsdp" if getattr(args, "fsdp", None) else "replicated"


def find_resumed(args: Any, state: Any, known: Sequence[tuple[int | None, str]]) -> Path:
    """The checkpoint from which a Trainer at `state.global_step` was resumed."""
    given = getattr(args, "resume_from_checkpoint", None)
    if isinstance(given, str) and CHECKPOINT_NAME.fullmatch(Path(given).name):
        return Path(given)
    for step, path in reversed(known):
        if step == state.global_step and path and Path(path).is_dir():
            return Path(path)
    named = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    # `True` takes the highest number: a trainer_state.json of another step must not hide which directory that was
    newest = None if named.is_dir() or not Path(args.output_dir).is_dir() else get_last_checkpoint(args.output_dir)
    return named if newest is None else Path(newest)
