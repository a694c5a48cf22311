"""Where the next launch takes its LR from, and whether an edit of the checkpoint alone decides it. Pure.

An edit is proved only where a scheduler that is known by all of its fields was saved, agrees with the optimizer's LRs,
and nothing else in the file concerns the LR. Everything else is a doubt: it names what was seen and, where it is known,
the argument that decides and what it must become. A plan with doubts is refused unless a person accepts it.

    doubts = lr_doubts(state, 0.5)     # () is the only answer that counts as proved

Each writer below is cited by the line of its loader that decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Any

from rollback.checkpoint.state import CheckpointState, HintKind, LrHint, OptimizerState, SchedulerState, names_lr
from rollback.files.config_text import ConfigFile
from rollback.lr.effect import agrees, last_lrs, of_first_rank
from rollback.lr.launch_command import changed_command, number_words
from rollback.lr.launch_config import LaunchConfig
from rollback.lr.optimizers import assumption_of, why_not_by_lr
from rollback.lr.oracle import reproduces_saved_lr
from rollback.lr.rules import SchedulerClass, infer_scheduler_class

_HANDS_OFF = "save it where it is read, as a state dict in a file of torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Why the edit of a checkpoint may not decide the LR; `change` is what to change for it, empty where unknown."""

    seen: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What else is known of the run: the guard's description of memory, the newest launch's command and the files it names.

    `pending` is the factor by which rollbacks have multiplied the LRs of this checkpoint since that command. `broken` says how
    a launch has not kept the LR of an earlier rollback, and `broken_id` in which entry.
    """

    memory: Mapping[str, Any] | None = None
    argv: tuple[str, ...] = ()
    files: tuple[ConfigFile, ...] = ()
    pending: float = 1.0
    broken: str = ""
    broken_id: str = ""

    @cached_property
    def config(self) -> LaunchConfig:
        """The LRs that the files name."""
        return LaunchConfig(self.files)


def lr_doubts(state: CheckpointState, scale: float, evidence: Evidence | None = None) -> tuple[Doubt, ...]:
    """Every reason for which multiplying the LRs of this checkpoint by `scale` may not do the same to the next launch."""
    evidence = evidence or Evidence()
    logs = _SPEECHBRAIN_LOGS if state.checkpoint.format == "speechbrain" else frozenset()
    found = [Doubt(seen=seen, change=_HANDS_OFF) for seen in state.doubtful]
    found += [
        Doubt(seen=seen, change="set the LR in the training script")
        for optimizer in of_first_rank(state.optimizers)
        for seen in why_not_by_lr(optimizer, logs)
    ]
    found += [doubt for scheduler in state.schedulers for doubt in _of_scheduler(scheduler, state, scale, evidence)]
    hints = [hint for hint in state.lr_hints if hint.kind is HintKind.SCHEDULER]
    found += [_of_hint(hint, scale, evidence) for hint in hints]
    if hints or any(_class_of(s) in (None, SchedulerClass.DEEPSPEED) for s in state.schedulers):
        return tuple(found)  # it is the scheduler that governs, and it was named
    for optimizer in of_first_rank(state.optimizers):
        found += _ungoverned(optimizer, state, scale, evidence)
    found += _by_hand(evidence)
    return tuple(found or _contradicted(evidence))


def filled_by_trainer(
    filled: Mapping[str, tuple[float, float]], path: str, scale: float, evidence: Evidence
) -> tuple[Doubt, ...]:
    """A doubt for the fields of a DeepSpeed config that are "auto": they take the trainer's own argument.

    transformers/integrations/deepspeed.py `trainer_config_process`: `learning_rate`; Accelerate takes the optimizer's `lr`.
    """
    if not filled:
        return ()
    _, after = next(iter(filled.values()))
    named = ", ".join(f"`{name}`" for name in filled)
    return (
        Doubt(
            seen=f'{named} in `{path}` {"is" if len(filled) == 1 else "are"} "auto": the trainer fills in its own argument',
            change=_elsewhere(evidence, scale)
            or f"give the trainer {number_words(after)} (`learning_rate` of a Trainer, `lr` of the optimizer under Accelerate)",
        ),
    )


def seen_by_guard(state: CheckpointState, memory: Mapping[str, Any] | None) -> bool:
    """Whether the guard saw a run without any scheduler train with the LRs of its groups, as it had foretold."""
    if memory is None or state.schedulers or any(hint.kind is HintKind.SCHEDULER for hint in state.lr_hints):
        return False
    return memory.get("lr_source") == "scheduler" and not memory.get("schedulers")


def _by_hand(evidence: Evidence) -> Iterator[Doubt]:
    if (evidence.memory or {}).get("lr_source") == "manual":
        yield Doubt(
            seen="the guard saw LRs that the saved scheduler does not give: the script sets its LR itself",
            change="multiply the LR where the script sets it",
        )


def _contradicted(evidence: Evidence) -> Iterator[Doubt]:
    """What speaks against a scheduler that was saved, is known and agrees: the launch may not load it, or override it."""
    if evidence.broken:
        yield Doubt(
            seen=f"a launch of this run has not kept the LR of an earlier rollback: {evidence.broken}",
            change="let the script load its scheduler, or change the LR where it sets it; "
            f"then `chronicle note --close {evidence.broken_id} --outcome worked`",
        )
    if (evidence.memory or {}).get("lr_source") == "scheduler":
        return  # a guard saw the LRs that the scheduler gives
    setters = evidence.config.setters()
    if setters:
        yield Doubt(
            seen=f"the script of the launch sets the LR of its parameter groups itself: {setters}",
            change="multiply the LR there, if the line is reached in the next launch",
        )


_SPEECHBRAIN_LOGS = frozenset({"prev_lr"})  # nnet/schedulers.py `update_learning_rate`: "to keep track of it", never read


def lr_assumptions(state: CheckpointState, evidence: Evidence) -> tuple[str, ...]:
    """What is assumed where no doubt is left: () is the only answer that counts as proved.

    A state dict names no class and no caller. What a guard saw at the save, and compares before the first step of the next
    launch, is no assumption.
    """
    found = [assumption_of(optimizer) for optimizer in of_first_rank(state.optimizers)]
    found += [_without_optimizer(scheduler) for scheduler in state.schedulers if not _has_optimizer(scheduler, state)]
    if (evidence.memory or {}).get("lr_source") != "scheduler":
        found += [_assumed_of(name) for name in dict.fromkeys(_names_in(s.state) for s in state.schedulers)]
        found.append(_not_edited(state))
    found += list(state.assumed)
    return tuple(dict.fromkeys(filter(None, found)))


def _has_optimizer(scheduler: SchedulerState, state: CheckpointState) -> bool:
    """Whether an optimizer is at its LRs, or began with them: of two schedulers that take turns one is at other LRs."""
    if last_lrs(scheduler.state) is None:
        return True
    begun = [[group.get("initial_lr") for group in one.groups] for one in state.optimizers]
    if scheduler.state.get("base_lrs") in begun:
        return True
    return any(agrees(scheduler.state, [group.get("lr") for group in one.groups]) for one in state.optimizers)


def _without_optimizer(scheduler: SchedulerState) -> str:
    where = _place(scheduler.file, scheduler.prefix)
    return (
        f"no optimizer that was read has the LRs of the scheduler `{where}` ({_shown(last_lrs(scheduler.state))}): "
        "its optimizer may be saved in another form, which is not edited"
    )


def _not_edited(state: CheckpointState) -> str:
    """The LRs that lie in the files and are no scheduler's and no optimizer's; "" for none."""
    named = _named_arguments(state)
    return f"{', '.join(named)} stays: a launch that sets its LR by it keeps the old one" if named else ""


def _named_arguments(state: CheckpointState) -> list[str]:
    arguments = [hint for hint in state.lr_hints if hint.kind is HintKind.ARGUMENTS]
    return [named for hint in arguments[:4] for named in _named_lrs(hint)][:6]


def _names_in(state: Mapping[str, object]) -> SchedulerClass | None:
    """The class that decides what is assumed: a function that is not saved, else the first one."""
    names = [infer_scheduler_class(state), *(_names_in(child) for child in _children(state) if isinstance(child, Mapping))]
    told = [name for name in names if name in _ASSUMED]
    return told[0] if told else names[0]


_ASSUMED: Mapping[SchedulerClass | None, str] = {
    SchedulerClass.LAMBDA: "the function of the LambdaLR is not saved: it may hold an absolute LR",
    SchedulerClass.ONE_CYCLE: "OneCycleLR is built before the optimizer is loaded: built after it, it sets its own LRs again",
    SchedulerClass.CYCLIC: "CyclicLR is built before the optimizer is loaded: built after it, it sets its own LRs again",
}


def _assumed_of(name: SchedulerClass | None) -> str:
    return _ASSUMED.get(name, f"{name} is its library's own class; a subclass may hold an LR in its code")


# --- Saved schedulers


def _class_of(scheduler: SchedulerState) -> SchedulerClass | None:
    return infer_scheduler_class(scheduler.state)


def _of_scheduler(scheduler: SchedulerState, state: CheckpointState, scale: float, evidence: Evidence) -> Iterator[Doubt]:
    name = _class_of(scheduler)
    if _is_unknown(scheduler.state):
        fields = ", ".join(sorted(map(str, scheduler.state))[:12])
        where = _place(scheduler.file, scheduler.prefix)
        yield Doubt(
            seen=f"no known scheduler class has exactly the fields of `{where}`: {fields}",
            change=_elsewhere(evidence, scale) or "multiply the LRs that the script gives this scheduler",
        )
    elif name is SchedulerClass.MEGATRON:
        yield from _of_megatron(scheduler, state, scale, evidence)


def _is_unknown(state: object) -> bool:
    if not isinstance(state, Mapping):
        return True
    return infer_scheduler_class(state) is None or any(map(_is_unknown, _children(state)))


def _children(state: Mapping[str, object]) -> Sequence[object]:
    children = state.get("_schedulers")
    return children if isinstance(children, list | tuple) else ()


def _ungoverned(optimizer: OptimizerState, state: CheckpointState, scale: float, evidence: Evidence) -> Iterator[Doubt]:
    """Doubts about one optimizer: no scheduler, one that disagrees with it, or one that its class does not explain."""
    schedulers = [s for s in state.schedulers if s.authoritative and _class_of(s) is not SchedulerClass.MMENGINE_OTHER]
    if not schedulers:
        if state.checkpoint.format != _TORCHTUNE or len(state.optimizers) > 1:
            yield _without_scheduler(optimizer, state, scale, evidence)
        return
    lrs = [group.get("lr") for group in optimizer.groups]
    governing = [s for s in schedulers if agrees(s.state, lrs)]
    if not governing:
        listed = "; ".join(f"`{_place(s.file, s.prefix)}` {_shown(last_lrs(s.state))}" for s in schedulers[:4])
        yield Doubt(
            seen=f"no saved scheduler is at the LRs of the optimizer in `{_place(optimizer.file, optimizer.prefix)}` "
            f"({_shown(lrs)}): {listed}",
            change="multiply the LR where the script sets it",
        )
        return
    answers = [reproduces_saved_lr(scheduler.state, optimizer.groups) for scheduler in governing]
    told = [(one, answer.reason) for one, answer in zip(governing, answers, strict=True) if answer and answer.contradicts]
    if len(told) == len(governing) and not _explained_by_two(schedulers, optimizer):
        yield Doubt(seen=f"`{_place(told[0][0].file, told[0][0].prefix)}`: {told[0][1]}")


def _explained_by_two(schedulers: Sequence[SchedulerState], optimizer: OptimizerState) -> bool:
    """Whether two schedulers that a script steps one after the other give the LRs, as torch's `ChainedScheduler` would."""
    lrs = [group.get("lr") for group in optimizer.groups]
    chains = ({"_schedulers": [one.state, other.state], "_last_lr": lrs} for one, other in permutations(schedulers[:4], 2))
    return any(reproduces_saved_lr(chain, optimizer.groups) is None for chain in chains)


# --- Writers whose next launch does not take its LR from the checkpoint


# torchtune makes a new scheduler with `last_epoch`, which computes from the loaded `initial_lr`; without one the loaded `lr`
# stays (recipes/full_finetune_single_device.py `_setup_lr_scheduler`)
_TORCHTUNE = "torchtune"


def _without_scheduler(optimizer: OptimizerState, state: CheckpointState, scale: float, evidence: Evidence) -> Doubt:
    where = _place(optimizer.file, optimizer.prefix)
    listed = _named_arguments(state)
    said = f"; it was saved with {', '.join(listed)}" if listed else ""
    return Doubt(
        seen=f"no scheduler was saved beside the optimizer in `{where}`: a launch that creates one, or sets the LR in its "
        f"loop, does not use the LR of the file{said}",
        change=_elsewhere(evidence, scale) or f"multiply it by {scale:.10g} where your script sets it",
    )


def _of_hint(hint: LrHint, scale: float, evidence: Evidence) -> Doubt:
    """A part that is a scheduler's by name or fields, and whose writer may be known."""
    where = _place(hint.file, hint.keys)
    if {str(name) for name in hint.values} == {"last_epoch"}:
        return Doubt(
            seen=f"`{where}` holds a counter alone: the launch computes from the LR of its own config "
            "(torchtitan, components/lr_scheduler.py `load_state_dict`: only `last_epoch` is read)",
            change=_elsewhere(evidence, scale) or f"multiply the LR of that config by {scale:.10g}",
        )
    shown = ", ".join(f"{name} {_short(value)}" for name, value in list(hint.values.items())[:8])
    return Doubt(
        seen=f"`{where}` looks like the state of a scheduler of an unknown class: {shown}",
        change=_elsewhere(evidence, scale) or "multiply the LRs that the script gives this scheduler",
    )


def _elsewhere(evidence: Evidence, scale: float) -> str:
    """Where a launch of an unknown writer may take its LR from: its command and configs; "" where neither names one."""
    command = _in_command(evidence, scale)
    fields = evidence.config.fields(scale, names_lr, changed_command(evidence.argv, scale).names)
    found = f"{fields} (`--lr-in FILE:key.path` edits it together with the checkpoint)" if fields else ""
    if command:
        return f"{command}; and perhaps {found}" if found else command
    return f"where the launch takes its LR from, perhaps {found}" if found else ""


_MEGATRON_USES_FILE = "--use-checkpoint-opt_param-scheduler"
_MEGATRON_OVERRIDES = "--override-opt_param-scheduler"


def _of_megatron(scheduler: SchedulerState, state: CheckpointState, scale: float, evidence: Evidence) -> Iterator[Doubt]:
    """`_check_and_set`: arguments under `override`, the file under `use_checkpoint`, else both must be equal."""
    arguments = next((h.values for h in state.lr_hints if "use_checkpoint_opt_param_scheduler" in h.values), {})
    from_file = bool(arguments.get("use_checkpoint_opt_param_scheduler"))
    override = bool(arguments.get("override_opt_param_scheduler"))
    if evidence.argv:
        from_file, override = _MEGATRON_USES_FILE in evidence.argv, _MEGATRON_OVERRIDES in evidence.argv
    initial = arguments.get("lr_warmup_init")
    warms = isinstance(initial, int | float) and initial > 0 and _within_warmup(scheduler.state)
    if from_file and not override and not warms:
        return
    rule = (
        f"with {_MEGATRON_OVERRIDES} it takes them from its arguments"
        if override
        else f"without {_MEGATRON_USES_FILE} its arguments must be equal to the checkpoint's"
    )
    yield Doubt(
        seen=f"Megatron's scheduler in `{_place(scheduler.file, scheduler.prefix)}`: {rule} "
        "(megatron/core/optimizer_param_scheduler.py `_check_and_set`)",
        change=(_elsewhere(evidence, scale) or f"multiply `--lr`, `--min-lr` and `--lr-warmup-init` by {scale:.10g}")
        + ("" if warms else f", or give {_MEGATRON_USES_FILE} and not {_MEGATRON_OVERRIDES}"),
    )


def _within_warmup(state: Mapping[str, object]) -> bool:
    done, warmup = state.get("num_steps"), state.get("lr_warmup_steps")
    return not isinstance(done, int | float) or not isinstance(warmup, int | float) or done <= warmup


# --- Words


def _named_lrs(hint: LrHint) -> Iterator[str]:
    for name, value in hint.values.items():
        number = value[0] if isinstance(value, list | tuple) and value else value
        if names_lr(name.rpartition(".")[2]) and isinstance(number, int | float) and number > 0:
            yield f"`{_place('', (*hint.keys, name))}` {number_words(number)}"


def _in_command(evidence: Evidence, scale: float) -> str:
    """The LRs of the newest launch's command times `scale` and what rollbacks have changed since; empty where it names none."""
    return changed_command(evidence.argv, scale * evidence.pending).sentence()


def _place(file: str, keys: Sequence[object]) -> str:
    dotted = ".".join(map(str, keys))
    return f"{file}:{dotted}" if file and dotted else file or dotted


def _shown(values: Sequence[object] | None) -> str:
    return "keeps no LR" if values is None else ", ".join(_short(v) for v in values[:4]) + (" …" if len(values) > 4 else "")


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
