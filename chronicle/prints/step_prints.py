"""Step prints of one rank: a few bytes that identify every optimizer step, for a replay or a relaunch to be compared with.

A print (`chronicle/prints/ring.py` lists its fields) is put together while a step is taken:

    first micro-batch enters    the global generators
    every micro-batch           a checksum of all that is in it, and of the batch of the loader that it came from
    the optimizer steps         learning rates and options of the groups, a sum of the gradients (by a closure: after it)
    the next batch enters       the step is over: a sum of the weights
    the step is logged          its loss, and the norm of its gradient

Sums are of all bits (`chronicle/prints/checksums.py`). What lies on an accelerator is copied to the host without waiting, and
read at a later step. There is no collective. Where a print of every step would cost more than `SHARE` of the time, only every
2nd, 4th, 8th … has one, at the latest every `MOST_STEPS`. The first steps of a launch and those after a save, on any rank, are
the ones that a relaunch takes again: all of them have a print, as many as take `CREDIT` seconds. A replay prints every step.
`CHRONICLE_PRINTS=off` ends it, `every` prints every step whatever it costs.

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
from typing import Any

from chronicle.metrics.log import heard
from chronicle.prints.checksums import Contents, contents_of, global_generators, sums_of
from chronicle.prints.launch_facts import add_sources, write_facts
from chronicle.prints.ring import NOTHING, Print, RingWriter, SaveMark, SeenParts, ring_path
from chronicle.resume.batches import keep_yielded
from chronicle.resume.contract import launch_number
from chronicle.resume.events import BatchEntered, Ended, Gradient, GradientReady, Inputs, Loaded, Saved, StepBegins
from chronicle.resume.faults import shield
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.samples import digest_of, is_captured
from chronicle.resume.training import Training
from rollback.channels import Role, find_channel

PRINTS_VARIABLE = "CHRONICLE_PRINTS"  # off, every; else as often as `SHARE` allows
SHARE = 0.004  # of the time may be spent on prints
MOST_STEPS = 64  # a power of two, as all distances are: ranks that print at other ones have steps in common
FIRST_STEPS = 8  # of a launch and after each save: all are printed, whatever that takes,
CREDIT = 0.03  # and more of them, for as many seconds: less than a save
GROUPS = 8  # of optimizers, whose options are read in one step
TOLD = ("lr", "weight_decay", "betas", "eps", "momentum", "alpha", "rho")  # other options an optimizer may change itself
NUM_WAITING = 512  # prints that wait for sums on a device, or for a loss


@dataclass(slots=True, eq=False)
class _Step:
    """A print that is being put together: fields that are known, and what waits for a device."""

    step: int = 0
    known: dict[str, Any] = field(default_factory=dict)
    batches: list[Contents] = field(default_factory=list)  # its micro-batches
    has_entered: bool = False  # a batch has, before the step began
    gradient: list[Any] = field(default_factory=list)  # sums on their way, as those of the weights
    weights: list[Any] = field(default_factory=list)
    begins: bool = False

    @property
    def ready(self) -> bool:
        """Whether all sums have arrived on the host."""
        parts = [*self.gradient, *self.weights]
        for one in self.batches:
            parts += [*one.inputs, *one.labels]
        return all(isinstance(part, bytes) or part.ready for part in parts)

    def to_print(self) -> Print:
        """The print; waits for sums that are on their way."""
        seen = SeenParts.BEGINS if self.begins else NOTHING
        seen |= SeenParts.LABELS if self.batches and all(one.are_named for one in self.batches) else NOTHING
        seen |= SeenParts.LOSS if "loss" in self.known else NOTHING
        batch = [part for one in self.batches for part in (*one.inputs, b"|")]
        are_known = bool(self.batches) and all(one.labels for one in self.batches)
        labels = [part for one in self.batches for part in (*one.labels, b"|")] if are_known else []
        return Print(
            step=self.step,
            seen=seen,
            batches=len(self.batches),
            batch=digest_of(batch) if batch else 0,
            labels=digest_of(labels) if labels else 0,
            gradient=digest_of(self.gradient) if self.gradient else 0,
            weights=digest_of(self.weights) if self.weights else 0,
            **self.known,
        )


UNPRINTED = _Step()  # a step without a print


class StepPrints(Observer):
    """The prints of one rank. Outside of a launch nothing is done; an error ends them."""

    about = "step print"
    most_errors = 1

    def __init__(self, training: Training) -> None:
        self._training = training
        self._mode = training.environ.get(PRINTS_VARIABLE, "").strip().lower()
        self._launch_dir = None if self._mode in ("off", "0", "no") else training.launch_dir
        self._rank = 0
        self._clock = time.perf_counter
        self._writer: RingWriter | None = None
        self._saves: SaveMark | None = None
        self._params: list[Any] = []
        self._now: _Step | None = None  # the step that is being taken
        self._coming = _Step()  # the one after it, whose batches enter before it begins
        self._waiting: deque[_Step] = deque()  # over, oldest first
        self._inside = False  # batches enter inside the step
        self._heard_at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that say when an update is over
        self._gradient_at_end: weakref.WeakSet[Any] = weakref.WeakSet()  # those of them whose closures make the gradient
        self._early: _Step | None = None  # the weights before the first batch
        self._begins = True  # the next step is the first one of the launch, or after a load
        self._skip = 0  # steps until the next print
        self._steps = 0  # since a print was timed
        self._taken, self._apart = 0, 1  # the newest step, and how far from the one before: several optimizers may be counted
        self._num_printed, self._credit = 0, CREDIT  # since the launch began or a save
        self._spent, self._since = 0.0, 0.0
        self._hears = shield(self._logged, self.failed)
        self.updated: Callable[[Any], None] = shield(self._updated, self.failed)
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
        for file in (self._writer, self._saves):
            if file is not None:
                file.close()
        self._writer = self._saves = None

    def failed(self, problem: Exception) -> None:
        """One of the hooks failed."""
        self._training.faults.record(self.about, problem)
        self.end()

    def ended(self, event: Ended) -> None:
        """The guard does nothing more in this launch."""
        if event.for_good:
            self.end()

    # ---- what happens in a step ----------------------------------------------------------------------------------

    def loaded(self, event: Loaded) -> None:
        """The next step is the first one of this state."""
        if self.on:
            self._close()
            self._coming, self._early = _Step(), None
            self._begins = True
            self._print_all()

    def saved(self, event: Saved) -> None:
        """The next steps are those that a relaunch takes first: they are printed on all ranks."""
        self._print_all()
        if self._saves is not None:
            self._saves.set(self._taken)

    def _print_all(self) -> None:
        self._num_printed, self._credit, self._skip = 0, CREDIT, 0

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """The step before is over, unless the batch enters inside of one."""
        if self._launch_dir is None:
            return RESTS
        if event.kind is Inputs.PASS:
            return None
        step = self._now if self._inside and self._now is not None else self._coming
        is_coming = step is self._coming
        step.has_entered = step.has_entered or is_coming
        if is_coming and self._saves is not None and self._saves.has_changed():
            self._print_all()
        is_skipped = self._skip > 0 and (self._now is None or self._now is UNPRINTED)
        if is_skipped or is_captured():
            return None
        if is_coming:
            self._close()
        if step is UNPRINTED or self._skip > 0:  # it was set as the step before was closed
            return None
        begun = self._clock()
        if is_coming and self._begins and self._early is None:
            self._params = _params(self._training.observe().optimizers[:1])
            self._early = self._beginning(self._training.step or 0) if self._params else None
        if not step.batches:
            step.known |= global_generators()
        step.batches.append(contents_of(event.batch))
        self._spent += self._clock() - begun
        return None

    def step_begins(self, event: StepBegins) -> Rest | None:
        """The guarded optimizer is about to take a step."""
        if self._launch_dir is None:
            return RESTS
        number, optimizer, gradient = event.number, event.optimizer, event.gradient
        if number is None or (self._now is not UNPRINTED and is_captured()):
            return None
        self._close()
        now, self._coming = self._coming, _Step()
        self._steps += 1
        self._taken, self._apart = number, max(1, number - self._taken)
        # Lightning's batch comes before a step whose closure makes the gradient; a step whose end is heard may have both
        self._inside = gradient is Gradient.AT_END or (gradient is Gradient.TOLD and not now.has_entered)
        self._hear_the_end(optimizer, with_gradient=gradient is Gradient.AT_END)
        if self._skip > 0:
            self._skip -= 1
            self._now = UNPRINTED
            return None
        begun = self._clock()
        others = _params(self._training.optimizers[1:])
        if optimizer is None:
            self._params = [p for model in self._training.models for p in model.parameters() if p.requires_grad]
        else:
            self._params = _params([optimizer])
        if self._begins:
            self._begin(max(0, number - 1), is_alone=not others)
        now.step, self._now = number, now
        if others:  # as they are now, and not at the end: a critic steps before the next batch of the model enters
            now.weights += sums_of(others)
        self._read_options(now, optimizer)
        self._spent += self._clock() - begun
        if gradient is Gradient.READY:
            self._take_gradient(optimizer)
        return None

    def _hear_the_end(self, optimizer: Any, *, with_gradient: bool) -> None:
        if with_gradient:
            self._gradient_at_end.add(optimizer)
        if optimizer in self._heard_at_end or not hasattr(optimizer, "register_step_post_hook"):
            return
        self._heard_at_end.add(optimizer)
        handle = optimizer.register_step_post_hook(functools.partial(_stepped, weakref.ref(self)))
        hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
        if hasattr(hooks, "move_to_end") and handle.id in hooks:  # before those by which a script puts things back
            hooks.move_to_end(handle.id, last=False)

    def _updated(self, optimizer: Any) -> None:
        """An update is over. Of a closure the last gradient is still there, and the next batch is that of another step."""
        now = self._now
        if self._launch_dir is None or (now is UNPRINTED and not self._inside):
            return
        if self._inside and optimizer in self._gradient_at_end:
            self._inside = False
            self._take_gradient(optimizer)
        if now is None or now is UNPRINTED:
            return
        begun = self._clock()
        self._read_options(now, optimizer)  # as they were used: a hook of the script may change them after the step has begun
        self._spent += self._clock() - begun

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """An adapter tells it; else the step itself showed it, or will."""
        if event.gradient is not Gradient.TOLD:
            return RESTS
        self._take_gradient(event.optimizer)
        return None

    def _take_gradient(self, optimizer: Any) -> None:
        """The gradient of the step is complete; that of an engine (None) cannot be reached."""
        if self._now is None or self._now is UNPRINTED or optimizer is None:
            return
        begun = self._clock()
        self._now.gradient = sums_of(param.grad for param in self._params)
        self._spent += self._clock() - begun

    def finish(self) -> None:
        """The process ends: nothing stays in memory."""
        if self._launch_dir is None:
            return
        self._close()
        self._settle(everything=True)
        if self._writer is not None and self._rank == 0:
            add_sources(self._launch_dir)

    # ---- putting a print together ----------------------------------------------------------------------------------

    def _beginning(self, step: int) -> _Step:
        return _Step(step=step, begins=True, weights=sums_of(self._params))

    def _begin(self, step: int, *, is_alone: bool) -> None:
        """The weights as they are before the first step: before its first batch, which may move them and bring them back."""
        early, self._early, self._begins = self._early, None, False
        if not self._params:
            raise ValueError("the optimizer has no parameters")
        if self._writer is None:
            self._open()
        if early is None or early.step != step:  # the model is called within the step
            early = self._beginning(step)
        if not is_alone:  # another optimizer may have stepped in this step already, and its weights are in every print
            early.weights = []
        self._waiting.append(early)

    def _open(self) -> None:
        assert self._launch_dir is not None
        ranks, launch = self._training.ranks, launch_number(self._training.environ)
        self._rank = ranks.rank  # its process group may be gone when the process ends
        device = str(self._params[0].device)
        found = arithmetic(device)
        header = {
            "rank": ranks.rank,
            "ranks": ranks.world_size,
            "launch": launch,
            "host": os.uname().nodename,
            "device": device,
            "machine": str(found.get("device name") or found["processor"])[:80],
        }
        self._writer = RingWriter(ring_path(self._launch_dir, ranks.rank), header)
        self._saves = SaveMark(self._launch_dir)
        if ranks.rank == 0:
            write_facts(self._launch_dir, found)

    def _close(self) -> None:
        """A step is over: its weights are read, and it waits for its batches, its loss and what is on a device."""
        now, self._now = self._now, None
        if now is None or now is UNPRINTED:
            return
        begun = self._clock()
        now.weights += sums_of(self._params)
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
        self._credit -= self._spent
        now = self._clock()
        per_step = (now - self._since) / max(1, self._steps)
        are_all = self._mode == "every" or self._num_printed <= FIRST_STEPS or self._credit > 0
        if not are_all and self._since and per_step > 0:
            least = max(1, math.ceil(self._spent / (SHARE * per_step)))
            distance = min(MOST_STEPS, 1 << (least - 1).bit_length())
            self._skip = distance - step // self._apart % distance - 1
        self._since, self._spent, self._steps = now, 0.0, 0

    def _settle(self, *, everything: bool = False) -> None:
        """Write what is complete. The newest one waits for its loss."""
        waiting, least = self._waiting, 0 if everything else 1
        while len(waiting) > least and (everything or len(waiting) > NUM_WAITING or waiting[0].ready):
            one = waiting.popleft()
            if self._writer is not None:
                self._writer.add(one.to_print())

    def _logged(self, step: int, values: Mapping[str, Any]) -> None:
        """The script logged numbers of a step."""
        for one in (self._now, *reversed(self._waiting)):
            if one is None or one.begins or one.step != step:
                continue
            for field_, role in (("loss", Role.LOSS), ("size", Role.NORM)):
                name = find_channel(values, role)
                if name is not None and isinstance(values[name], float):
                    one.known[field_] = values[name]
            return

    def _read_options(self, now: _Step, optimizer: Any) -> None:
        groups = [] if optimizer is None else [group for one in self._training.optimizers for group in one.param_groups]
        if groups:
            told = [[_plain(group[name]) for name in TOLD if name in group] for group in _chosen(groups, now.step)]
            lr = _plain(groups[0].get("lr"))
            now.known["options"] = (zlib.crc32(repr(told).encode()) & 0xFFFF) or 1
            now.known["lr"] = float(lr) if isinstance(lr, int | float) else math.nan


def _plain(value: Any) -> Any:
    """A number, or a row of numbers; of anything else its type alone. A tensor on a device is not waited for."""
    if isinstance(value, int | float | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if hasattr(value, "numel") and value.numel() == 1 and value.device.type == "cpu":
        return value.item()
    return type(value).__name__


def _params(optimizers: Sequence[Any]) -> list[Any]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [p for group in groups for p in group["params"] if p.requires_grad]


def _chosen(groups: Sequence[Any], step: int) -> list[Any]:
    """The groups that are looked at in this step: other ones at every step, and the same in a replay."""
    if len(groups) <= GROUPS:
        return list(groups)
    first = step * GROUPS % len(groups)
    return [groups[(first + i) % len(groups)] for i in range(GROUPS)]


def _finish(reference: "weakref.ref[StepPrints]") -> None:
    prints = reference()
    if prints is not None:
        shield(prints.finish, prints.failed)()


def _stepped(reference: "weakref.ref[StepPrints]", optimizer: Any, args: Any, kwargs: Any) -> None:
    prints = reference()
    if prints is not None:
        prints.updated(optimizer)


def arithmetic(device: str) -> dict[str, Any]:
    """What decides the last digits on this machine, as far as torch tells."""
    torch = sys.modules["torch"]
    found = {
        "torch": str(torch.__version__),
        "device": device,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "processor": _told_in("/proc/cpuinfo", "model name"),  # libraries of linear algebra choose by it
        "kernel": os.uname().release,
        "build": f"{zlib.crc32(torch.__config__.show().encode()):08x}",  # compiler, MKL and oneDNN with their versions
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.startswith("cuda"):
        found |= {
            "device name": torch.cuda.get_device_name(),
            "driver": _told_in("/proc/driver/nvidia/version", "NVRM"),
            "cuda": str(torch.version.cuda),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "",
            "cudnn": torch.backends.cudnn.version(),
            "cudnn benchmark": torch.backends.cudnn.benchmark,
            "cudnn deterministic": torch.backends.cudnn.deterministic,
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return found


def _told_in(path: str, name: str) -> str:
    """What the first line that begins so says behind its colon; "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as table:
            return next((line.partition(":")[2].strip() for line in table if line.startswith(name)), "")
    except OSError:
        return ""
