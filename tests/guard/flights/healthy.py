"""Healthy trainings of many kinds, in each of which something is unusual: whatever is told about them is a false alarm."""

import copy
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tests.guard.flights.fly import Flight, attached, fly, loss_of, network

STEPS = 70


@dataclass(frozen=True, slots=True)
class Training:
    """One kind of training; `quick`: cheap enough for the tests."""

    name: str
    fly: Callable[[Path], Flight]
    quick: bool


HEALTHY: dict[str, Training] = {}


def healthy(name: str, *, quick: bool = True) -> Callable[[Callable[[Path], Flight]], Callable[[Path], Flight]]:
    """Register a training."""

    def register(train: Callable[[Path], Flight]) -> Callable[[Path], Flight]:
        HEALTHY[name] = Training(name, train, quick)
        return train

    return register


def play_healthy(name: str, seed: int) -> Flight:
    """One launch of it in a fresh directory."""
    torch.manual_seed(seed)
    random.seed(seed)
    with tempfile.TemporaryDirectory() as directory:
        return HEALTHY[name].fly(Path(directory))


def usual(model: Any, optimizer: Any, **options: Any) -> Callable[[int], object]:
    """zero_grad, backward, step; `after()` comes after the step."""
    after = options.get("after", lambda: None)

    def step(number: int) -> None:
        optimizer.zero_grad(set_to_none=options.get("set_to_none", True))
        loss_of(model).backward()
        optimizer.step()
        after()

    return step


def train(directory: Path, model: Any, optimizer: Any, step: Any = None, scheduler: Any = None, **options: Any) -> Flight:
    """Attach and fly the usual loop, or another `step`."""
    run = attached(directory, model, optimizer, scheduler, **options)
    run.session.envelope.share_of_time = 1e9 if STEPS > 50 else 0.005  # a look at every step: more chances to be wrong
    return fly(run, STEPS, step or usual(model, optimizer))


def optimizers() -> dict[str, Callable[[Any], Any]]:
    """Every optimizer that takes plain gradients."""
    optim = torch.optim
    return {
        "sgd": lambda p: optim.SGD(p, lr=0.01),
        "sgd-momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
        "adam": lambda p: optim.Adam(p, lr=1e-3),
        "adamw-small-lr": lambda p: optim.AdamW(p, lr=1e-7),
        "adamax": lambda p: optim.Adamax(p),
        "nadam": lambda p: optim.NAdam(p),
        "radam": lambda p: optim.RAdam(p),
        "rprop": lambda p: optim.Rprop(p),
        "rmsprop": lambda p: optim.RMSprop(p),
        "adagrad": lambda p: optim.Adagrad(p),
        "adadelta": lambda p: optim.Adadelta(p),
        "asgd": lambda p: optim.ASGD(p),
        "adafactor": lambda p: optim.Adafactor(p),
        "foreach": lambda p: optim.AdamW(p, foreach=True),
        "fused": lambda p: optim.AdamW(p, fused=True),
        "tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
        "maximize": lambda p: optim.SGD(p, lr=1e-5, maximize=True),
    }


def _of_optimizer(make: Callable[[Any], Any]) -> Callable[[Path], Flight]:
    def training(directory: Path) -> Flight:
        model = network()
        return train(directory, model, make(model.parameters()))

    return training


for _name, _make in optimizers().items():
    healthy(f"optimizer {_name}", quick=_name in ("sgd", "adamw-small-lr", "rprop", "tensor-lr"))(_of_optimizer(_make))


def schedulers() -> dict[str, Callable[[Any], Any]]:
    """Schedulers that are stepped once a step."""
    lr = torch.optim.lr_scheduler
    return {
        "warm-up from 0": lambda o: lr.LambdaLR(o, lambda s: min(1.0, s / 30)),
        "one-cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
        "cosine to 0": lambda o: lr.CosineAnnealingLR(o, 20),
        "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 10),
        "sequential": lambda o: lr.SequentialLR(o, [lr.ConstantLR(o, 0.1, 5), lr.ExponentialLR(o, 0.9)], [5]),
        "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o, 0.1, 5), lr.ExponentialLR(o, 0.9)]),
        "cyclic": lambda o: lr.CyclicLR(o, 1e-4, 1e-2, step_size_up=5),
    }


def _of_scheduler(make: Callable[[Any], Any]) -> Callable[[Path], Flight]:
    def training(directory: Path) -> Flight:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = make(optimizer)
        return train(directory, model, optimizer, usual(model, optimizer, after=scheduler.step), scheduler)

    return training


for _name, _make in schedulers().items():
    healthy(f"scheduler {_name}", quick=_name in ("warm-up from 0", "chained"))(_of_scheduler(_make))


@healthy("scheduler plateau")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    return train(directory, model, optimizer, usual(model, optimizer, after=lambda: scheduler.step(1.0)), scheduler)


@healthy("LR by hand beside a scheduler")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    def step(number: int) -> None:
        if number < 20:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * number / 20
        usual(model, optimizer)(number)
        scheduler.step()

    return train(directory, model, optimizer, step, scheduler)


@healthy("generative adversarial pair")
def _(directory: Path) -> Flight:
    g, d = network(), torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())

    def step(number: int) -> None:
        fake = g(torch.randn(8, 8))
        opt_d.zero_grad()
        (d(fake.detach()).mean() - d(torch.randn(8, 1)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)
        opt_d.step()
        opt_g.zero_grad()
        (-d(fake).mean()).backward()
        torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)
        opt_g.step()

    return train(directory, [g, d], [opt_g, opt_d], step)


@healthy("adversarial pair, only the generator guarded, critic five times", quick=False)
def _(directory: Path) -> Flight:
    g, d = network(), torch.nn.Linear(1, 1)
    opt_g, opt_d = torch.optim.Adam(g.parameters()), torch.optim.RMSprop(d.parameters())

    def step(number: int) -> None:
        for _ in range(5):
            opt_d.zero_grad()
            (d(g(torch.randn(8, 8))).mean() - d(torch.randn(8, 1)).mean()).backward()
            opt_d.step()
            with torch.no_grad():
                for p in d.parameters():
                    p.clamp_(-0.01, 0.01)
        opt_g.zero_grad()
        (-d(g(torch.randn(8, 8))).mean()).backward()
        opt_g.step()

    return train(directory, g, opt_g, step)


@healthy("LoRA on a frozen base")
def _(directory: Path) -> Flight:
    class Lora(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = torch.nn.Linear(8, 1).requires_grad_(False)
            self.a, self.b = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 1, bias=False)
            torch.nn.init.zeros_(self.b.weight)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.b(self.a(x))

    model = Lora()
    return train(directory, model, torch.optim.AdamW(model.parameters(), lr=1e-3))


@healthy("frozen backbone in evaluation mode, unfrozen later")
def _(directory: Path) -> Flight:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    model[0].requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        if number == 20:
            model[0].requires_grad_(True)
            model[1].train()
        if number == 40:
            model[1].eval()
        usual(model, optimizer)(number)

    return train(directory, model, optimizer, step)


@healthy("tied embeddings")
def _(directory: Path) -> Flight:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20, bias=False)
            self.head.weight = self.inside.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.inside(tokens))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        tokens = torch.randint(0, 20, (4, 5))
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).reshape(-1, 20), tokens.reshape(-1)).backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("mixture with experts that are seldom or never used")
def _(directory: Path) -> Flight:
    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[random.choice((0, 0, 0, 1, 1, 2))](x)

    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters())
    return train(directory, model, optimizer, usual(model, optimizer, set_to_none=False))


@healthy("layer drop")
def _(directory: Path) -> Flight:
    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)), torch.nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x if self.training and random.random() < 0.2 else layer(x).tanh()
            return self.head(x)

    model = Dropped()
    optimizer = torch.optim.AdamW(model.parameters())
    return train(directory, model, optimizer, usual(model, optimizer, set_to_none=random.random() < 0.5))


@healthy("fp16 scaler that skips steps")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        scale = 1e30 if number % 5 == 0 else 1.0
        scaler.scale(loss_of(model) * scale).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return train(directory, model, optimizer, step, scaler=scaler)


@healthy("gradient checkpointing")
def _(directory: Path) -> Flight:
    from torch.utils.checkpoint import checkpoint

    model = network(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 8, requires_grad=True)
        checkpoint(model, x, use_reentrant=number % 2 == 0).square().mean().backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("weight decay only: a loss of zero")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (loss_of(model) * 0).backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("zero gradients and no decay: nothing moves")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (loss_of(model) * 0).backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("LR 0 throughout")
def _(directory: Path) -> Flight:
    model = network()
    return train(directory, model, torch.optim.SGD(model.parameters(), lr=0.0))


@healthy("average that is swapped in for an evaluation")
def _(directory: Path) -> Flight:
    model = network(dropout=0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def after() -> None:
        average.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.eval()
        with torch.no_grad():
            loss_of(model)
        model.train()
        model.load_state_dict(kept)

    return train(directory, model, optimizer, usual(model, optimizer, after=after), averages={"ema": average})


@healthy("sparse embedding")
def _(directory: Path) -> Flight:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(12, 1))
    rare, usual_one = torch.optim.SparseAdam(model[0].parameters()), torch.optim.Adam(model[2].parameters())

    def step(number: int) -> None:
        for optimizer in (rare, usual_one):
            optimizer.zero_grad()
        model(torch.randint(0, 50, (4, 3))).square().mean().backward()
        for optimizer in (rare, usual_one):
            optimizer.step()

    return train(directory, model, [rare, usual_one], step)


@healthy("L-BFGS with a closure")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        optimizer.step(closure)

    return train(directory, model, optimizer, step)


@healthy("closure of an automatic optimization")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        def closure() -> torch.Tensor:
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        optimizer.step(closure)

    return train(directory, model, optimizer, step)


@healthy("sharpness-aware: two passes a step")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        loss_of(model).backward()
        moves = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        loss_of(model).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()

    return train(directory, model, optimizer, step)


@healthy("bf16 weights whose small updates round to nothing")
def _(directory: Path) -> Flight:
    model = network().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 8, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("bf16 autocast with a head in full precision")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = model[:3](torch.randn(8, 8))
            with torch.autocast("cpu", enabled=False):
                loss = model[3](x.float()).square().mean()
        loss.backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("accumulation by a loop, zeroed before the next pass")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        for _ in range(4 if number % 7 else 1):  # a shorter last step of every epoch
            (loss_of(model) / 4).backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=False)

    return train(directory, model, optimizer, step, accumulation=4)


@healthy("clipping by value, norm measured without a limit")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    return train(directory, model, optimizer, step)


@healthy("only a part is clipped")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 1.0)
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("evaluation between the steps, dropout and batch norm")
def _(directory: Path) -> Flight:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def after() -> None:
        model.eval()
        with torch.no_grad():
            loss_of(model)
        model.train()

    return train(directory, model, optimizer, usual(model, optimizer, after=after))


@healthy("recurrent, truncated through time", quick=False)
def _(directory: Path) -> Flight:
    model = torch.nn.LSTM(8, 8, 2, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: list[Any] = [None]

    def step(number: int) -> None:
        out, state[0] = model(torch.randn(4, 2, 8), state[0])
        state[0] = tuple(part.detach() for part in state[0])
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("optimizer built late for a part that was frozen")
def _(directory: Path) -> Flight:
    model = network()
    model[0].requires_grad_(False)
    first = torch.optim.AdamW(model[3].parameters())
    late: list[Any] = []

    def step(number: int) -> None:
        if number == 10:
            model[0].requires_grad_(True)
            late.append(torch.optim.SGD(model[0].parameters(), lr=0.01))
        for optimizer in (first, *late):
            optimizer.zero_grad()
        loss_of(model).backward()
        for optimizer in (first, *late):
            optimizer.step()

    return train(directory, model, first, step)


@healthy("a teacher beside the student", quick=False)
def _(directory: Path) -> Flight:
    model, teacher = network(dropout=0.1), network(dropout=0.1).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 8)
        (model(x) - teacher(x)).square().mean().backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("channels last, tiny and scalar parameters", quick=False)
def _(directory: Path) -> Flight:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = torch.nn.Conv2d(3, 4, 3), torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x).mean((1, 2, 3)) * self.scale

    model = Scaled().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        optimizer.step()

    return train(directory, model, optimizer, step)


@healthy("a mask of minus infinity kept as a parameter")
def _(directory: Path) -> Flight:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.mask = torch.nn.Linear(8, 4), torch.nn.Parameter(torch.tensor([0.0, 0.0, 0.0, -torch.inf]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(self.inner(x) + self.mask, 1)[:, :1]

    model = Masked()
    return train(directory, model, torch.optim.SGD(model.parameters(), lr=0.01))


@healthy("accumulation whose batches, micro-batches and scale change at saves")
def _(directory: Path) -> Flight:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    run = attached(directory, model, optimizer, scaler=scaler)

    def step(number: int) -> None:
        optimizer.zero_grad()
        passes, rows = (4, 4) if number <= 20 else (4, 8) if number <= 40 else (8, 8)
        for _ in range(passes):
            x = torch.randn(rows, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().sum() / rows
            scaler.scale(loss / passes).backward()
        scaler.step(optimizer)
        scaler.update()
        if number % 10 == 0:
            run.session.describe()

    return fly(run, STEPS, step)
