"""A step taken twice, on purpose: `check_steps=N` repeats forward and backward of every Nth step, and compares the bits.

A machine that computes wrongly now and then leaves no error, only a loss that goes wrong later. The same weights, batch and
random numbers must give the same bits. So the calls of the model in a checked step are kept with what they began from and with
the gradient that came to their outputs. Right before the optimizer moves they are made again, and outputs and gradients of the
parameters are compared. Where they differ, a third time says which of the two was the odd one.

Nothing of the training is touched: generators, buffers and plain attributes of the modules are put back, and `.grad` stays as
it was. The second and third step of every launch are taken twice as well: arithmetic that does not repeat itself shows there,
and that part is compared no more, which is said. It costs one more forward and backward in N steps, and the memory of one more
set of gradients.
"""

import contextlib
import random
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chronicle.journal.events import Incident
from chronicle.prints.checksums import checksum
from chronicle.resume.batches import tensors_of
from chronicle.resume.configuration import unwrapped
from chronicle.resume.events import BatchEntered, Ended, GradientReady, Loaded
from chronicle.resume.faults import shield
from chronicle.resume.fingerprint import LiveState
from chronicle.resume.hub import RESTS, Observer, Rest
from chronicle.resume.patches import change_object
from chronicle.resume.training import Training

KIND = "step-differs"
TRIALS = (2, 3)  # steps of a launch: the first one makes buffers, and chooses kernels
NUM_CALLS = 64  # of one step
OUTPUTS, GRADIENTS = "output", "gradient"
DEVICES = ("cpu", "cuda")


Take = dict[str, list[Any]]  # of one pass: checksums of all output tensors, and of all gradients of parameters, b"" for none


def _differing(one: Take, other: Take) -> list[str]:
    """The parts that are not the same bits; gradients where both have them."""
    return [part for part in one if one[part] and other[part] and _read(one[part]) != _read(other[part])]


@dataclass(slots=True)
class _Call:
    """One call of a model in a checked step, with what is needed to make it again."""

    model: Any
    args: Any
    kwargs: Any
    inputs: list[Any]
    state: "_State"
    autocast: list[tuple[str, bool, Any]]
    params: list[Any]  # that are trained
    is_sharded: bool  # they are parts of tensors (FSDP2, tensor parallelism)
    versions: list[int]
    first: Take
    arrived: dict[int, Any] = field(default_factory=dict)  # gradients that came to the outputs
    is_alone: bool = True  # its backward pass was one, and no other call's
    hooks: list[Any] = field(default_factory=list)

    @property
    def has_gradient(self) -> bool:
        """Whether the gradients of the first pass are known, and those of this call alone."""
        return self.is_alone and bool(self.arrived) and any(self.first[GRADIENTS])

    @property
    def is_unchanged(self) -> bool:
        """Whether weights and inputs are still those that the call began with."""
        return self.versions == _versions(self.params) and _read(self.inputs) == _read(_checksums((self.args, self.kwargs)))


class StepTwice(Observer):
    """Checks every `check_steps`th step of this process; 0: none. `quiet()`: a context in which the guard hears no model.

    An error of the check ends it.
    """

    about = "check of steps"
    most_errors = 1

    def __init__(self, training: Training, quiet: Callable[[], AbstractContextManager[Any]]) -> None:
        self._training, self._journal, self._ranks, self._quiet = training, training.journal, training.ranks, quiet
        self._every = 0 if training.off else training.options.check_steps
        self._parts = [OUTPUTS, GRADIENTS]  # that are still compared
        self._calls: list[_Call] = []
        self._steps = 0  # of this launch that were completed

    @property
    def is_on(self) -> bool:
        """Whether steps are checked at all."""
        return self._every > 0 and OUTPUTS in self._parts

    def ended(self, event: Ended) -> None:
        """No call is made again; for good, no step is checked from now on."""
        self.forget()
        if event.for_good:
            self._parts = []

    def _failed(self, problem: Exception) -> None:
        """One of the hooks failed."""
        self._training.faults.record(self.about, problem)
        self.ended(Ended(for_good=True))

    def batch_entered(self, event: BatchEntered) -> Rest | None:
        """A batch is about to enter a model, one of those in use or the module inside it."""
        if not self.is_on:
            return RESTS
        done = self._training.step
        if event.call is not None and len(self._calls) < NUM_CALLS and self._is_due(None if done is None else done + 1):
            self._keep_call(self._training.observe(), *event.call)
        return None

    def _keep_call(self, live: LiveState, model: Any, args: Any, kwargs: Any) -> None:
        target = _below_replicas(next((one for one in live.models if unwrapped(one) is unwrapped(model)), model))
        if why := _cannot(target):
            self._say(f"check_steps is off: {why}")
            self.ended(Ended(for_good=True))
            return
        params = _params_of(target, live)
        is_sharded = any(hasattr(param, "to_local") for param in params)
        inputs, versions = _checksums((args, kwargs)), _versions(params)
        first: Take = {OUTPUTS: [], GRADIENTS: [b""] * len(params)}
        call = _Call(target, args, kwargs, inputs, _State.of(target), _autocast(), params, is_sharded, versions, first)
        call.hooks.append(target.register_forward_hook(shield(partial(self._left, call), self._failed)))
        for place, param in enumerate(params):
            call.hooks.append(_on_gradient(param, shield(partial(self._came, call, place), self._failed)))
        self._calls.append(call)

    def loaded(self, event: Loaded) -> None:
        """Nothing of the present step is taken again."""
        self.forget()

    def gradient_ready(self, event: GradientReady) -> Rest | None:
        """The optimizer has not moved: make the calls of the step again."""
        if not self.is_on:
            return RESTS
        self._steps += 1
        calls, is_trial = self._calls, self._steps in TRIALS
        self.forget()
        for call in calls:
            if self.is_on and call.first[OUTPUTS] and call.is_unchanged:
                self._check(call, event.step, is_trial=is_trial)
        return None

    def _is_due(self, number: int | None) -> bool:
        return self._steps + 1 in TRIALS or (self._steps > 0 and number is not None and number % self._every == 0)

    def forget(self) -> None:
        """Nothing of the present step is taken again."""
        for call in self._calls:
            for hook in call.hooks:
                hook.remove()
        self._calls = []

    # ---- the first time ------------------------------------------------------------------------------------------

    def _left(self, call: _Call, _model: Any, _inputs: Any, output: Any) -> None:
        """The model has returned."""
        if call.first[OUTPUTS]:
            return
        call.first[OUTPUTS] = _checksums(output)
        for place, tensor in enumerate(tensors_of(output)):
            if tensor.requires_grad:
                call.hooks.append(tensor.register_hook(shield(partial(self._arrives, call, place), self._failed)))

    def _arrives(self, call: _Call, place: int, gradient: Any) -> None:
        """The loss has given its gradient to an output."""
        if call is not self._calls[-1] or place in call.arrived:  # a loss of several calls, or a second backward pass
            call.is_alone = self._calls[-1].is_alone = False
        call.arrived[place] = gradient.detach()

    def _came(self, call: _Call, place: int, gradient: Any) -> None:
        """A parameter got its gradient: that of the newest call."""
        if call is not self._calls[-1]:
            return
        if call.first[GRADIENTS][place]:
            call.is_alone = False
        call.first[GRADIENTS][place] = checksum(gradient)

    # ---- and again -----------------------------------------------------------------------------------------------

    def _check(self, call: _Call, number: int | None, *, is_trial: bool) -> None:
        second = self._again(call)
        odd = _differing(call.first, second)
        anywhere = self._anywhere(call, odd)
        if not anywhere:
            return
        if is_trial:
            self._drop(anywhere)
            return
        third = self._again(call)
        is_first_odd = bool(_differing(third, call.first))
        if self._anywhere(call, [OUTPUTS] if is_first_odd and _differing(third, second) else []):
            self._drop(anywhere)
        elif OUTPUTS in odd or (odd and not call.is_sharded):
            self._tell(number, odd, f"rank {self._ranks.rank} on {socket.gethostname()}", is_first_odd=is_first_odd)
        elif OUTPUTS not in anywhere and self._ranks.rank == 0:
            where = "a rank that is not known (gradients are sums over ranks)"
            self._tell(number, anywhere, where, is_first_odd=is_first_odd)

    def _anywhere(self, call: _Call, odd: list[str]) -> list[str]:
        """The parts that differ here, or on any rank: sharded ranks compute together, and must go on together."""
        if not call.is_sharded:
            return odd
        reports = self._ranks.gather({"rank": self._ranks.rank, "odd": odd})
        return sorted({part for report in reports for part in report["odd"]})

    def _again(self, call: _Call) -> Take:
        now = _State.of(call.model)
        call.state.put_back()
        try:
            with self._quiet(), contextlib.ExitStack() as stack:
                torch = sys.modules["torch"]
                stack.enter_context(torch.enable_grad())
                for device, enabled, dtype in call.autocast:
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
                tensors = tensors_of(call.model(*call.args, **call.kwargs))
            take: Take = {OUTPUTS: _checksums(tensors), GRADIENTS: []}
            if GRADIENTS in self._parts and call.has_gradient and len(tensors) == len(call.first[OUTPUTS]):
                take[GRADIENTS] = _gradients(call, tensors)
            return take
        finally:
            now.put_back()
            for part in call.model.modules():
                if hasattr(part, "reshard"):  # FSDP2 keeps its root gathered for a backward pass that may not come
                    part.reshard()

    # ---- words ---------------------------------------------------------------------------------------------------

    def _drop(self, parts: Sequence[str]) -> None:
        """These parts do not repeat themselves here."""
        self._parts = [OUTPUTS] if OUTPUTS not in parts else []
        rest = "check_steps compares outputs alone" if self._parts else "check_steps is off"
        cause = "the arithmetic is not deterministic, or the model draws from a generator of its own"
        self._say(f"{rest}: the same step taken twice gives another {' and '.join(parts)} here ({cause})")

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            self._journal.say("check_steps", text)

    def _tell(self, number: int | None, odd: Sequence[str], where: str, *, is_first_odd: bool) -> None:
        third, meaning = "first", "the second was odd"
        if is_first_odd:
            third, meaning = "second", "the training goes on with the odd one: go back to before this step"
        text = (
            f"step {number}, taken twice by {where} from the same weights, batch and random numbers, gave another "
            f"{' and '.join(odd)}; a third time it was as the {third}: {meaning}, and have this machine tested"
        )
        incident = Incident(kind=KIND, tier="warn", onset_step=number, channels=("guard",), change="opened", text=text)
        self._journal.write(incident, step=number, title=f"warn: {KIND}: {text}", from_any_rank=True)
        self._journal.say(f"{KIND} {number}", f"{KIND}: {text}")


# ---- what a call begins from -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    """Random generators, and of every module its attributes, buffers, plain tensors and lists, as they are at one moment."""

    generators: list[tuple[Callable[[Any], None], Any]]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    tensors: list[tuple[Any, Any]]
    lists: list[tuple[Any, Any]]

    @classmethod
    def of(cls, model: Any) -> "_State":
        """That of now."""
        attributes, tensors, lists = [], [], []
        for module in model.modules():
            own = vars(module)
            attributes.append((own, dict(own)))
            for thing in (*own["_buffers"].values(), *own.values()):
                if _is_plain_tensor(thing):
                    tensors.append((thing, thing.detach().clone()))
                elif isinstance(thing, list | deque):
                    lists.append((thing, list(thing)))
        return cls(list(_generators()), attributes, tensors, lists)

    def put_back(self) -> None:
        """Make it so again; a tensor that did not change is not written."""
        torch = sys.modules["torch"]
        for own, then in self.attributes:
            for name in own.keys() - then.keys():
                del own[name]
            own.update(then)
        for thing, items in self.lists:
            thing.clear()
            thing.extend(items)
        with torch.no_grad():
            for tensor, then in self.tensors:
                if not torch.equal(tensor, then):
                    tensor.copy_(then)
        for set_state, state in self.generators:
            set_state(state)


def _is_plain_tensor(thing: Any) -> bool:
    return hasattr(thing, "untyped_storage") and not thing.requires_grad and not thing.is_meta


def _generators() -> Iterator[tuple[Callable[[Any], None], Any]]:
    """How each global generator is set, and its state."""
    torch, numpy = sys.modules["torch"], sys.modules.get("numpy")
    yield torch.set_rng_state, torch.get_rng_state()
    if torch.cuda.is_initialized():
        yield torch.cuda.set_rng_state, torch.cuda.get_rng_state()
    yield random.setstate, random.getstate()
    if numpy is not None:
        yield numpy.random.set_state, numpy.random.get_state()


def _read(checksums: Iterable[Any]) -> list[bytes]:
    """Checksums as bytes; waits for what is on its way from a device."""
    return [one if isinstance(one, bytes) else one.bytes() for one in checksums]


def _checksums(things: Any) -> list[Any]:
    """Of every tensor in it."""
    return [checksum(tensor) for tensor in tensors_of(things)]


def _params_of(model: Any, live: LiveState) -> list[Any]:
    """The trained parameters of a model; under FSDP2, which has gathered them when a batch enters, the optimizer's shards."""
    found: list[Any] = []
    if any(hasattr(module, "reshard") for module in model.modules()):
        for optimizer in live.optimizers:
            for group in optimizer.param_groups:
                found.extend(group["params"])
    else:
        found.extend(model.parameters())
    return [param for param in found if param.requires_grad]


def _versions(params: Sequence[Any]) -> list[int]:
    """How often each parameter was written, as autograd counts it: it moves when an optimizer steps."""
    return [param._version for param in params]


def _autocast() -> list[tuple[str, bool, Any]]:
    torch = sys.modules["torch"]
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in DEVICES]


def _below_replicas(model: Any) -> Any:
    """The module inside DDP: it computes alone, and no gradient is exchanged."""
    while type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        model = model.module
    return model


def _cannot(model: Any) -> str:
    """Why calls of this model cannot be made again, in words; "" where they can."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if "FullyShardedDataParallel" in names or any(hasattr(param, "ds_tensor") for param in model.parameters()):
        return "FSDP1 and DeepSpeed's ZeRO-3 take parameters away after each pass; use FSDP2 (`fully_shard`)"
    if vars(model).get("_compiled_call_impl") is not None:
        return "`model.compile()` hides the model's outputs; use `torch.compile(model)`"
    return ""


def _on_gradient(param: Any, came: Callable[[Any], None]) -> Any:
    """A hook that gets this rank's own gradient of a parameter, before ranks exchange it; of a shard, what was exchanged."""
    if hasattr(param, "to_local"):
        return param.register_post_accumulate_grad_hook(lambda param: came(param.grad))
    return param.register_hook(came)


def _gradients(call: _Call, tensors: Sequence[Any]) -> list[Any]:
    """Checksums of the gradients that the first pass's output gradients give to the parameters; `.grad` stays as it is."""
    torch = sys.modules["torch"]
    outputs = [tensors[place] for place in call.arrived]
    arrived = list(call.arrived.values())
    if not call.is_sharded:
        found = torch.autograd.grad(outputs, call.params, arrived, allow_unused=True)
        return [b"" if one is None else checksum(one) for one in found]
    kept = [param.grad for param in call.params]
    try:
        for param in call.params:
            change_object(param, "grad", None)
        torch.autograd.backward(outputs, arrived)
        return [b"" if param.grad is None else checksum(param.grad) for param in call.params]
    finally:
        for param, gradient in zip(call.params, kept, strict=True):
            change_object(param, "grad", gradient)
