"""Public silent bugs made small, each with the step from which the training is wrong and the kinds of breach that name it."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.guard.flights.fly import Flight, attached, fly, loss_of, network
from tests.guard.flights.ranks import fly_ranks

STEPS = 6


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug. `plant(directory)` trains with it; None: it has no training step at which it could be seen."""

    name: str
    what: str
    begins: int  # the first wrong step
    kinds: tuple[str, ...]
    plant: Callable[[Path], Flight] | None = None

    @property
    def ranks(self) -> bool:
        """Whether it needs several ranks."""
        return self.plant is not None and "fly_ranks" in self.plant.__code__.co_names


BUGS: dict[str, Bug] = {}


def bug(name: str, what: str, begins: int, *kinds: str) -> Callable[[Callable[[Path], Flight]], Callable[[Path], Flight]]:
    """Register a bug."""

    def register(plant: Callable[[Path], Flight]) -> Callable[[Path], Flight]:
        BUGS[name] = Bug(name, what, begins, kinds, plant)
        return plant

    return register


def plain_step(model: Any, optimizer: Any) -> Callable[[int], object]:
    """The usual step."""

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    return step


# ---- user code -------------------------------------------------------------------------------------------------------


@bug("pytorch-forum-84911", "the optimizer holds the head, which is frozen afterwards", 1, "optimizer-on-other-parameters")
def _(directory: Path) -> Flight:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model[2].parameters())
    for part in (model[0], model[2]):
        part.requires_grad_(False)
    run = attached(directory, model, optimizer)
    return fly(run, STEPS, plain_step(model, optimizer))


@bug("stackoverflow-60335387", "zero_grad is missing", 2, "gradients-not-zeroed")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        loss_of(model).backward()
        optimizer.step()

    return fly(run, STEPS, step)


# ---- frameworks ------------------------------------------------------------------------------------------------------


@bug("pytorch-115607", "a compiled step that had no gradient once never updates again", 4, "parameters-do-not-move")
def _(directory: Path) -> Flight:
    model = network()

    class Compiled(torch.optim.Adam):
        stuck = False

        def step(self, closure: Any = None) -> Any:
            self.stuck = self.stuck or all(p.grad is None for group in self.param_groups for p in group["params"])
            return None if self.stuck else super().step(closure)

    optimizer = Compiled(model.parameters())
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        if number != 3:
            loss_of(model).backward()
        optimizer.step()

    return fly(run, 120, step)


# ---- ranks: two processes over gloo ----------------------------------------------------------------------------------


@bug("deepspeed-1801", "one rank does not clip the gradients of replicated weights (BLOOM-176B)", 1, "replicas-differ")
def _(directory: Path) -> Flight:
    return fly_ranks("clip")


@bug("pytorch-104336", "the model goes to another device and back: DDP's hooks are lost", 3, "replicas-differ")
def _(directory: Path) -> Flight:
    return fly_ranks("moved")


@bug("x-jxmnop-ddp-out-of-sync", "the forward goes past the DDP wrapper", 1, "replicas-differ")
def _(directory: Path) -> Flight:
    return fly_ranks("unwrapped")


@bug("pytorch-84803", "a transfer between devices loses data on one rank", 3, "replicas-differ", "weights-not-finite")
def _(directory: Path) -> Flight:
    return fly_ranks("zeroed")


@bug("pytorch-96600", "as 84803: an all-reduce loses data on one rank", 3, "replicas-differ", "weights-not-finite")
def _(directory: Path) -> Flight:
    return fly_ranks("lossy")


@bug("baichuan2-86", "as 84803: what arrives on the second device is NaN", 3, "weights-not-finite", "replicas-differ")
def _(directory: Path) -> Flight:
    return fly_ranks("nan")


# no training step in which they could be seen
BUGS["deepspeed-5794"] = Bug("deepspeed-5794", "MoE workers disagree on the capacity and hang in all_to_all", 1, ())
BUGS["transformers-17877"] = Bug("transformers-17877", "weights are initialised several times: slow, not wrong", 1, ())
BUGS["transformers-23723"] = Bug("transformers-23723", "generate() makes more than max_new_tokens", 1, ())


# ---- further public bugs, outside TrainCheck's list -------------------------------------------------------------------

FURTHER: dict[str, Bug] = {}


def further(name: str, what: str, begins: int, *kinds: str) -> Callable[[Callable[[Path], Flight]], Callable[[Path], Flight]]:
    """Register a bug outside the list."""

    def register(plant: Callable[[Path], Flight]) -> Callable[[Path], Flight]:
        FURTHER[name] = Bug(name, what, begins, kinds, plant)
        return plant

    return register


@further("accelerate-2665", "a wrapper makes the parameters anew after the optimizer", 1, "optimizer-on-other-parameters")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model = copy.deepcopy(model)
    run = attached(directory, model, optimizer)
    return fly(run, STEPS, plain_step(model, optimizer))


@further("resized-embedding", "an embedding is replaced after the optimizer was built", 1, "optimizer-on-other-parameters")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model[3] = torch.nn.Linear(16, 1)
    run = attached(directory, model, optimizer)
    return fly(run, STEPS, plain_step(model, optimizer))


@further("copied-model", "a copy of the model is trained, made after the optimizer was", 1, "parameters-do-not-move")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer)
    return fly(run, STEPS, plain_step(copy.deepcopy(model), optimizer))


@further("clip-consumed-generator", "the generator of parameters was used up by the optimizer", 2, "clipping-not-done")
def _(directory: Path) -> Flight:
    import warnings

    model = network()
    params = model.parameters()
    optimizer = torch.optim.AdamW(params)
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return fly(run, STEPS, step)


@further("clip-after-step", "clipping comes after the step", 3, "clipping-not-done")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return fly(run, STEPS, step)


@further("clip-before-unscale", "fp16 gradients are clipped before they are unscaled", 2, "clipping-not-done")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    run = attached(directory, model, optimizer, scaler=scaler)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return fly(run, STEPS, step)


@further("accumulation-not-done", "four micro-batches are declared, the optimizer steps after each", 4, "accumulation-not-done")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer, accumulation=4)
    return fly(run, STEPS, plain_step(model, optimizer))


@further("eval-not-left", "train() is not called again after an evaluation", 4, "mode-changed")
def _(directory: Path) -> Flight:
    model = network(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer)
    usual = plain_step(model, optimizer)

    def step(number: int) -> None:
        usual(number)
        if number == 3:
            model.eval()

    return fly(run, 60, step)


@further("untied", "loading with assign=True makes two tensors of tied weights", 4, "weights-not-tied")
def _(directory: Path) -> Flight:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.head = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
            self.head.weight = self.inside.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.inside(x).tanh())

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer)
    usual = plain_step(model, optimizer)

    def step(number: int) -> None:
        if number == 4:
            model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        usual(number)

    return fly(run, 60, step)


@further("half-in-evaluation", "an evaluation calls half() and leaves it", 4, "dtype-changed")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        if number == 4:
            model.to(torch.bfloat16)
        optimizer.zero_grad()
        x = torch.randn(8, 8).to(model[0].weight.dtype)
        model(x).square().mean().backward()
        optimizer.step()

    return fly(run, 60, step)


@further("nan-loss", "the loss is NaN from step 9 on", 9, "weights-not-finite")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    run = attached(directory, model, optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model)
        (loss * float("nan") if number >= 9 else loss).backward()
        optimizer.step()

    return fly(run, 14, step)


@further("lr-by-hand", "the LR is no longer the scheduler's from step 60 on", 60, "lr-not-the-schedulers")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    run = attached(directory, model, optimizer, scheduler)
    usual = plain_step(model, optimizer)

    def step(number: int) -> None:
        if number >= 60:
            optimizer.param_groups[0]["lr"] = 0.5
        usual(number)
        scheduler.step()

    return fly(run, 240, step)


def play(one: Bug) -> Flight | None:
    """Train with a bug in a fresh directory; None where there is nothing to train."""
    if one.plant is None:
        return None
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        return one.plant(Path(directory))
