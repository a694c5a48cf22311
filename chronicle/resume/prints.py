"""Step prints of one rank: a few bytes that identify every optimizer step, for a replay to be compared with.

A print (`chronicle/resume/ring.py` lists its fields) is put together while a step is taken:

    first micro-batch enters    the global generators; how the models are set
    every micro-batch           a checksum of all that is in it, and of the batch of the loader that it came from; of what the
                                model gives for it
    the optimizer steps         learning rates and options of the groups, a sample of the gradients (by a closure: after it)
    the next batch enters       the step is over: a sample of the weights
    the step is logged          its loss, and the norm of its gradient

Samples are small: 32 elements of 8 tensors, others at every step, so that in the course of many steps all are looked at. What
lies on an accelerator is copied to the host without waiting, and read at a later step. There is no collective. Where a print of
every step would cost more than `SHARE` of the time, only every 2nd, 4th, 8th … has one, at the latest every `MOST_STEPS`; a
replay prints every step. `CHRONICLE_PRINTS=off` ends it, `every` prints every step whatever it costs.

The first rank also notes what the prints were made by, once a launch (`prints.json`): digests of the source files that this
process runs, versions of packages, the environment and how the arithmetic was set.
"""

import atexit
import functools
import math
import os
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from chronicle.metrics.log import heard
from chronicle.resume.batches import keep_yielded, tensors_of
from chronicle.resume.checksums import (
    SetParts,
    checksum_of_output,
    chosen,
    contents_of,
    digest_of_all,
    digest_of_batches,
    global_generators,
    is_ready,
    modes_of,
    sample_of,
    set_parts,
    short_digest,
)
from chronicle.resume.faults import shield
from chronicle.resume.launch_facts import write_facts
from chronicle.resume.learning_rate import is_within_its_step
from chronicle.resume.one_step import StepBatch
from chronicle.resume.ring import RingWriter, SeenParts, ring_path
from rollback.channels import Role, find_channel

PRINTS_VARIABLE = "CHRONICLE_PRINTS"  # off, every; else as often as `SHARE` allows
SHARE = 0.004  # of the time may be spent on prints
MOST_STEPS = 64  # a power of two, as all distances are: ranks that print at other ones have steps in common
FIRST_STEPS = 8  # of a launch: all are printed, and none of them is timed
MOST_OUTPUTS = 8  # tensors, of one micro-batch
MOST_GROUPS = 8
TOLD = ("lr", "weight_decay", "betas", "eps", "momentum")
NUM_WAITING = 512  # prints that wait for samples on a device, or for a loss
LARGEST_NORM = 3.4e38  # of 32 bits
PLAIN = (int, float, bool)


# as numbers: a flag costs a microsecond each time
BEGINS, BATCH, GRADIENT, WEIGHTS, GENERATORS, OPTIONS, LOSS, TARGETS = (
    int(SeenParts[name]) for name in ["BEGINS", "BATCH", "GRADIENT", "WEIGHTS", "GENERATORS", "OPTIONS", "LOSS", "TARGETS"]
)


class Gradient(Enum):
    """When the gradient of a step is complete."""

    READY = "before the step"
    AT_END = "the step calls the model and the backward pass by a closure, and its end is heard"
    TOLD = "the same, and an adapter calls `gradient_ready`"


@dataclass(slots=True)
class _Step:
    """A print that is being put together."""

    step: int
    seen: int = 0
    batches: "list[list[Any]]" = field(default_factory=list)  # what each micro-batch holds, as checksums
    gradient: "list[Any] | None" = None
    weights: "list[Any] | None" = None
    outputs: "list[Any]" = field(default_factory=list)
    torch: int = 0
    python: int = 0
    numpy: int = 0
    modes: int = 0
    options: int = 0
    told: "list[Any] | None" = None  # what its optimizer was told for the update, when the step began
    lr: float = 0.0
    size: float = 0.0
    loss: float = math.nan
    over: bool = field(default=False)

    def entered(self, found: tuple[int, int, int, int]) -> None:
        """Generators and modes, as they were when the first micro-batch entered."""
        self.torch, self.python, self.numpy, self.modes = found
        self.seen |= GENERATORS


UNPRINTED = _Step(0, over=True)  # a step without a print: its micro-batches are dropped


class StepPrints:
    """The prints of one rank. `launch_dir` None: nothing is done."""

    def __init__(
        self,
        launch_dir: Path | None,
        rank: Callable[[], int],
        num_ranks: Callable[[], int],
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._mode = environ.get(PRINTS_VARIABLE, "").strip().lower()
        self._launch_dir = None if self._mode in ("off", "0", "no") else launch_dir
        self._launch, self._rank, self._num_ranks = environ.get("CHRONICLE_LAUNCH", ""), rank, num_ranks
        self._clock = clock
        self._writer: RingWriter | None = None
        self._params: list[Any] = []
        self._others: Sequence[Any] = ()
        self._now: _Step | None = None  # of the step that is being taken
        self._waiting: deque[_Step] = deque()  # over, oldest first
        self._batches: list[list[Any]] = []  # micro-batches since the step before
        self._outputs: list[Any] = []  # of the model, for these
        self._sees_outputs = True
        self._with_targets = True  # all of them are known as a whole: with what the loss is computed from
        self._entered: tuple[int, int, int, int] | None = None  # generators and modes, when the first micro-batch entered
        self._inside = False  # batches enter inside the step
        self._has_entered = False  # one has entered for the step that comes
        self._heard_at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that say when an update is over
        self._gradient_at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # those of them whose closures make the gradient
        self.trained: Callable[[], tuple[int | None, Sequence[Any]]] = lambda: (None, ())  # steps completed, optimizers
        self.models: Callable[[], Sequence[Any]] = tuple  # that are guarded
        self._set_parts = SetParts()
        self._early: tuple[int, list[tuple[list[Any], list[Any]]]] | None = None  # step, parameters and their sample
        self._begins = True  # the next step is the first one of the launch, or after a load
        self._skip = 0  # steps until the next print
        self._steps = 0  # since a print was timed
        self._taken, self._apart = 0, 1  # the newest step, and how far from the one before: several optimizers may be counted
        self._num_printed = 0
        self._spent, self._since = 0.0, 0.0
        self._models: Sequence[Any] = ()
        self.batch: StepBatch | None = None
        self.failed: Callable[[Exception], None] = lambda problem: None  # told of an error of the guard itself
        self.lost_outputs: Callable[[Exception], None] = lambda problem: None  # told of one that is in no print from now on
        self._hears = shield(self._logged, lambda problem: self.failed(problem))
        self.updated: Callable[[Any], None] = shield(self._updated, lambda problem: self.failed(problem))
        self.leaves: Callable[[Any], None] = shield(self._leaves, self._lose_outputs)  # called with what the model gives
        if self._launch_dir is not None:
            heard.append(self._hears)
            keep_yielded()
            atexit.register(_finish, weakref.ref(self))

    @property
    def on(self) -> bool:
        """Whether steps are printed."""
        return self._launch_dir is not None

    def end(self) -> None:
        """Print no more."""
        self._launch_dir = None
        if self._hears in heard:
            heard.remove(self._hears)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # ---- what happens in a step ----------------------------------------------------------------------------------

    def loaded(self) -> None:
        """Another state is in memory."""
        if self.on:
            self._close(self._now)
            self._batches, self._outputs, self._with_targets = [], [], True
            self._begins, self._now, self._entered, self._skip, self._early = True, None, None, 0, None
            self._has_entered = False

    def enters(self, batch: Any) -> None:
        """A micro-batch is about to enter the model: the step before is over, unless the batch enters inside of one."""
        if self._launch_dir is None:
            return
        now = self._now
        if now is None or not self._inside:
            self._has_entered = True
        if self._skip > 0 and (now is None or now is UNPRINTED):
            return
        if is_captured():
            return
        if now is not None and not self._inside:
            self._close(now)
        if self._skip > 0:
            return
        begun = self._clock()
        if self._begins and self._early is None and not self._inside:
            self._look_early()
        if self._entered is None:
            self._entered = (*global_generators(), modes_of(self._set_parts))
        if self.batch is not None:
            self.batch.enters(batch)
        found, with_targets = contents_of(batch)
        self._batches.append(found)
        self._with_targets = self._with_targets and with_targets
        self._spent += self._clock() - begun

    def _leaves(self, output: Any) -> None:
        """The model gave this for the micro-batch that entered last."""
        if self._launch_dir is None or self._skip > 0 or not self._batches or not self._sees_outputs:
            return
        is_between = self._now is not None and not self._inside  # a step was taken, and the next batch has not come
        if is_between or is_captured():
            return
        begun = self._clock()
        room = MOST_OUTPUTS * len(self._batches) - len(self._outputs)
        self._outputs += map(checksum_of_output, tensors_of(output)[:room])
        self._spent += self._clock() - begun

    def _lose_outputs(self, problem: Exception) -> None:
        """What the model gives cannot be read: it is in no print from now on."""
        self._sees_outputs, self._outputs = False, []
        self.lost_outputs(problem)

    def stepping(
        self,
        step: int | None,
        optimizer: Any,
        models: Sequence[Any],
        others: Sequence[Any] = (),
        *,
        gradient: Gradient = Gradient.READY,
    ) -> None:
        """The guarded optimizer is about to take this step (optimizer steps completed when it is over); None: an engine.

        `others`: optimizers beside it, whose options and parameters are looked at as well (a critic's).
        """
        if self._launch_dir is None or step is None or (self._now is not UNPRINTED and is_captured()):
            return
        self._close(self._now)
        self._steps += 1
        self._taken, self._apart = step, max(1, step - self._taken)
        # Lightning's batch comes before a step whose closure makes the gradient; a step whose end is heard may have both
        self._inside = gradient is Gradient.AT_END or (gradient is Gradient.TOLD and not self._has_entered)
        self._has_entered = False
        if gradient is Gradient.AT_END:
            self._gradient_at_end.add(optimizer)
        if hasattr(optimizer, "register_step_post_hook") and optimizer not in self._heard_at_end:
            self._heard_at_end.add(optimizer)
            handle = optimizer.register_step_post_hook(functools.partial(_stepped, weakref.ref(self)))
            hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
            if hasattr(hooks, "move_to_end") and handle.id in hooks:  # before those by which a script puts things back
                hooks.move_to_end(handle.id, last=False)
        if self.batch is not None:
            self.batch.stepping(step, self._rank())
        if self._skip > 0:
            self._skip -= 1
            self._now = UNPRINTED
            return
        self._others = [one for one in others if optimizer is not None and not _is_one(one, optimizer)]
        begun = self._clock()
        if self._begins:
            self._begin(step - 1, optimizer, models)
        elif optimizer is not None and not self._are_these(optimizer):
            # a training that grew, or froze a part, steps other parameters now
            self._params, self._set_parts = _params(optimizer, models), set_parts(models)
        self._now = now = _Step(step)
        self._models = models
        if self._entered is not None:
            now.entered(self._entered)
            self._entered = None
        self._read_options(now, optimizer, models)
        if self._others:  # as they are now, and not at the end: a critic steps before the next batch of the model enters
            params = [p for one in self._others for p in _params(one, models)]
            now.weights = sample_of(chosen(params, step), step)
        self._spent += self._clock() - begun
        if gradient is Gradient.READY:
            self.gradient_ready(optimizer)

    def _updated(self, optimizer: Any) -> None:
        """An update is over. Of a closure the last gradient is still there, and the next batch is that of another step."""
        now = self._now
        if self._launch_dir is None or (now is UNPRINTED and not self._inside):
            return
        if self._inside and optimizer in self._gradient_at_end:
            self._inside = False
            self.gradient_ready(optimizer)
        if now is not None and now.told is not None and not now.over:
            begun = self._clock()
            used = _for_the_update(optimizer)
            if used != now.told:  # a hook of the script changed it after the step had begun
                now.options, now.told = zlib.crc32(repr(used).encode(), now.options), used
                now.lr = _lr_of(optimizer.param_groups)
            self._spent += self._clock() - begun

    def gradient_ready(self, optimizer: Any) -> None:
        """The gradient of the step is complete; that of an engine (None) cannot be reached."""
        if self._now is None or self._now.over or optimizer is None:
            return
        begun = self._clock()
        params = chosen(self._params, self._now.step)
        grads = [p.grad if p.grad is None or not p.grad.is_sparse else None for p in params]
        if any(grad is not None for grad in grads):
            self._now.gradient = sample_of(grads, self._now.step)
            self._now.seen |= GRADIENT
        self._spent += self._clock() - begun

    def finish(self) -> None:
        """The process ends: nothing stays in memory."""
        if self._launch_dir is None:
            return
        self._close(self._now)
        self._settle(everything=True)
        if self._writer is not None:
            self._writer.flush()

    def _look_early(self) -> None:
        """The weights before the first batch: it may move them and bring them back before its step."""
        self._set_parts = set_parts(self.models())
        step, optimizers = self.trained()
        step = step or 0
        found = [_params(one, ()) for one in optimizers]
        self._early = step, [(params, sample_of(chosen(params, step), step)) for params in found if params]

    # ---- putting a print together ----------------------------------------------------------------------------------

    def _begin(self, step: int, optimizer: Any, models: Sequence[Any]) -> None:
        """The weights as they are before the first step; what the prints are made by."""
        self._begins = False
        if self._early is None:  # the model is called within the step
            self._set_parts = set_parts(models)
        self._params = _params(optimizer, models)
        if not self._params:
            raise ValueError("the optimizer has no parameters")
        if self._writer is None:
            assert self._launch_dir is not None
            rank = self._rank()
            device = str(self._params[0].device)
            launch = int(self._launch) if self._launch.isdecimal() else None
            header = {"rank": rank, "ranks": self._num_ranks(), "launch": launch, "host": os.uname().nodename, "device": device}
            self._writer = RingWriter(ring_path(self._launch_dir, rank), header)
            if rank == 0:
                write_facts(self._launch_dir, arithmetic(device))
        first = _Step(max(0, step), BEGINS, over=True)
        if not self._others:  # another optimizer may have stepped in this step already, and its weights are in every print
            early_step, early = self._early or (-1, [])
            samples = (sample for params, sample in early if early_step == first.step and _are_same(params, self._params))
            now = next(samples, None)
            first.weights = sample_of(chosen(self._params, first.step), first.step) if now is None else now
            first.seen = BEGINS | WEIGHTS
        self._early = None
        self._waiting.append(first)

    def _are_these(self, optimizer: Any) -> bool:
        """Whether the first and the last of the optimizer's parameters that train are those that are sampled."""
        groups = optimizer.param_groups
        first = next((p for group in groups for p in group["params"] if p.requires_grad), None)
        last = next((p for group in reversed(groups) for p in reversed(group["params"]) if p.requires_grad), None)
        return bool(self._params) and first is self._params[0] and last is self._params[-1]

    def _close(self, now: _Step | None) -> None:
        """A step is over: its weights are read, and it waits for its batches, its loss and what is on a device."""
        self._now = None
        if now is None:
            return
        if now is UNPRINTED and not self._batches:
            self._entered = None
            return
        entered, self._entered = self._entered, None
        batches, self._batches = self._batches, []
        outputs, self._outputs = self._outputs, []
        with_targets, self._with_targets = self._with_targets, True
        if now is UNPRINTED:
            return
        begun = self._clock()
        if entered is not None and not now.seen & GENERATORS:  # the batch entered inside the step
            now.entered(entered)
        now.weights = [*(now.weights or ()), *sample_of(chosen(self._params, now.step), now.step)]
        now.seen |= WEIGHTS
        now.over = True
        if batches:
            now.batches = batches
            now.seen |= BATCH | (TARGETS if with_targets else 0)
        now.outputs = outputs
        self._waiting.append(now)
        self._settle()
        self._spent += self._clock() - begun
        self._pace(now.step)

    def _pace(self, step: int) -> None:
        """How many steps have no print after this one.

        All ranks print the steps whose numbers are multiples of the distance that they keep, so they have those of the
        largest one in common without asking each other.
        """
        self._num_printed += 1
        now = self._clock()
        if self._num_printed <= FIRST_STEPS or not self._since:
            self._since, self._spent, self._steps = now, 0.0, 0
            return
        per_step = (now - self._since) / max(1, self._steps)
        if self._mode != "every" and per_step > 0:
            least = max(1, math.ceil(self._spent / (SHARE * per_step)))
            distance = min(MOST_STEPS, 1 << (least - 1).bit_length())
            self._skip = distance - step // self._apart % distance - 1
        self._since, self._spent, self._steps = now, 0.0, 0

    def _settle(self, *, everything: bool = False) -> None:
        """Write what is complete. The newest one waits for its loss."""
        waiting = self._waiting
        least = 0 if everything else 1
        while len(waiting) > least and self._is_complete(waiting[0], everything or len(waiting) > NUM_WAITING):
            self._write(waiting.popleft())

    def _is_complete(self, one: _Step, wait: bool) -> bool:
        parts = (one.gradient, one.weights, one.outputs, *one.batches)
        return wait or all(map(is_ready, parts))

    def _write(self, one: _Step) -> None:
        if self._writer is None:
            return
        self._writer.add(
            one.step,
            one.seen,
            len(one.batches),
            digest_of_batches(one.batches) if one.batches else 0,
            digest_of_all(one.gradient),
            digest_of_all(one.weights),
            one.size,
            one.torch,
            one.python,
            one.numpy,
            one.options,
            one.modes,
            short_digest(one.outputs),
            one.lr,
            one.loss,
        )

    def _logged(self, step: int, values: Mapping[str, Any]) -> None:
        """The script logged numbers of a step."""
        for one in (*([self._now] if self._now is not None and not self._now.over else ()), *reversed(self._waiting)):
            if one.step == step and one.seen and not one.seen & BEGINS:
                name = find_channel(values, Role.LOSS)
                if name is not None and isinstance(values[name], float):
                    one.loss, one.seen = values[name], one.seen | LOSS
                name = find_channel(values, Role.NORM)
                if name is not None and isinstance(values[name], float):
                    one.size = max(min(values[name], LARGEST_NORM), -LARGEST_NORM)  # NaN stays what it is
                return

    def _read_options(self, now: _Step, optimizer: Any, models: Sequence[Any]) -> None:
        groups = [] if optimizer is None else [group for one in (optimizer, *self._others) for group in one.param_groups]
        if not groups:
            return
        if len(groups) > MOST_GROUPS:
            first = now.step % len(groups)
            groups = [groups[0], *(groups[first:] + groups[:first])[: MOST_GROUPS - 1]]
        rows = [[(name, _plain(value)) for name, value in group.items() if name != "params"] for group in groups]
        now.options, now.seen = zlib.crc32(repr(rows).encode()), now.seen | OPTIONS
        now.lr, now.told = _lr_of(groups), _for_the_update(optimizer)


def _lr_of(groups: Sequence[Mapping[str, Any]]) -> float:
    lr = _plain(groups[0].get("lr"))
    return float(lr) if isinstance(lr, int | float) else math.nan


def _for_the_update(optimizer: Any) -> list[Any]:
    """What the script tells an optimizer for its update; without what some optimizers change themselves by it."""
    return [[_plain(group[name]) for name in TOLD if name in group] for group in optimizer.param_groups[:MOST_GROUPS]]


def _plain(value: Any) -> Any:
    """A number, or a row of numbers; of anything else its type alone. A tensor on a device is not waited for."""
    if isinstance(value, PLAIN) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if hasattr(value, "numel") and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return type(value).__name__


# ---- samples -----------------------------------------------------------------------------------------------------------


def _params(optimizer: Any, models: Sequence[Any]) -> list[Any]:
    if optimizer is None:
        return [p for model in models for p in model.parameters() if p.requires_grad]
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _are_same(params: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(params) == len(others) and all(one is other for one, other in zip(params, others, strict=True))


def _is_one(one: Any, optimizer: Any) -> bool:
    """Whether two optimizers step the same parameters (one may wrap the other)."""
    groups, known = one.param_groups, optimizer.param_groups
    return groups is known or bool(groups and known and groups[0] is known[0])


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing may be read from the device then, and no generator."""
    torch = sys.modules["torch"]
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _finish(reference: "weakref.ref[StepPrints]") -> None:
    prints = reference()
    if prints is not None:
        shield(prints.finish, prints.failed)()


def _stepped(reference: "weakref.ref[StepPrints]", optimizer: Any, args: Any, kwargs: Any) -> None:
    prints = reference()
    if prints is not None and not is_within_its_step(optimizer):
        prints.updated(optimizer)


def arithmetic(device: str) -> dict[str, Any]:
    """What decides the last digits on this machine, as far as torch tells."""
    torch = sys.modules["torch"]
    found = {
        "torch": str(torch.__version__),
        "device": device,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.startswith("cuda"):
        found |= {
            "device name": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": torch.backends.cudnn.version(),
            "cudnn benchmark": torch.backends.cudnn.benchmark,
            "cudnn deterministic": torch.backends.cudnn.deterministic,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def _processor() -> str:
    """The model of the processor: libraries of linear algebra choose by it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as table:
            return next((line.partition(":")[2].strip() for line in table if line.startswith("model name")), "")
    except OSError:
        return ""
