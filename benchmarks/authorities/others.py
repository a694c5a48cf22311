"""Writers that no one asked for: the edit is exact, or the command says that it does not know.

    python -m benchmarks.authorities others

Where a library is installed, its own scheduler and state dict are used. The others are small loops after their documented
source, each cited: what they save under which names, and what their resume computes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler as L

from benchmarks.authorities.writers import (
    ADAMW,
    HORIZON,
    IGNORE,
    LATER_STEPS,
    NOTHING,
    SAVED_AT,
    SGD,
    Case,
    Config,
    Lrs,
    model_and,
    need,
    one_step,
    single_file,
)

OTHERS: list[Case] = []


def add(name: str, loop: Callable[[Path, Config, bool], Lrs], *, shown: bool = True, **config: Any) -> None:
    """A case that may be exact or refused. Not `shown`: no file tells it, only the guard or the first logged LRs do."""
    OTHERS.append(Case(name=name, loop=loop, config={"lr": 1e-3, **config}, free=True, shown=shown))


class Plain:
    """A scheduler that is no torch class: `lr(n)` times each base; its state are its attributes without the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, **fields: Any) -> None:
        self.optimizer = optimizer
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.__dict__.update(fields)
        self.step()

    def factor(self) -> float:
        raise NotImplementedError

    def step(self) -> None:
        self.n = getattr(self, "n", -1) + 1
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.factor()

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


# --- pytorch-ignite: param schedulers, saved by their own state dict (ignite/handlers/param_scheduler.py)


def _ignite(kind: str) -> Callable[[Path, Config, bool], Lrs]:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        module = need("ignite.handlers.param_scheduler")
        if kind == "cosine":
            made = module.CosineAnnealingScheduler(optimizer, "lr", config["lr"], config["lr"] / 10, HORIZON)
        elif kind == "linear":
            made = module.LinearCyclicalScheduler(optimizer, "lr", config["lr"], 0.0, HORIZON, param_group_index=0)
        elif kind == "piecewise":
            made = module.PiecewiseLinear(optimizer, "lr", [(0, 0.0), (30, config["lr"]), (90, config["lr"] / 5)])
        elif kind == "warm-up":
            inner = module.CosineAnnealingScheduler(optimizer, "lr", config["lr"], 0.0, HORIZON)
            made = module.create_lr_scheduler_with_warmup(inner, 0.0, 10, warmup_end_value=config["lr"])
        else:
            made = module.LRScheduler(L.CosineAnnealingLR(optimizer, 60))
        made(None)
        return made

    return single_file(make, step=lambda scheduler, n: scheduler(None), name="checkpoint_20.pt")


for _kind in ("cosine", "linear", "piecewise", "warm-up", "around torch"):
    add(f"ignite {_kind}", _ignite(_kind))

# --- SpeechBrain: its schedulers return the LR, the script sets it (speechbrain/nnet/schedulers.py)


def _speechbrain(kind: str, *, saved: bool = True) -> Callable[[Path, Config, bool], Lrs]:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        module = need("speechbrain.nnet.schedulers")
        if kind == "noam":
            return module.NoamScheduler(config["lr"], 8)
        if kind == "linear":
            return module.LinearScheduler(config["lr"], config["lr"] / 10, HORIZON)
        return module.CyclicLRScheduler(base_lr=config["lr"] / 10, max_lr=config["lr"], step_size=15)

    def step(scheduler: Any, n: int) -> None:
        if kind == "linear":
            _, lr = scheduler(n)
            need("speechbrain.nnet.schedulers").update_learning_rate(scheduler.__dict__["_optimizer"], lr)
        elif kind == "noam":
            scheduler(scheduler._optimizer)
        else:
            scheduler.on_batch_end(scheduler._optimizer)

    def with_optimizer(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        made = make(optimizer, config)
        made._optimizer = optimizer
        return made

    def state(scheduler: Any, config: Config) -> dict[str, Any]:
        return {"scheduler": {k: v for k, v in vars(scheduler).items() if k != "_optimizer"}} if saved else {}

    def load(scheduler: Any, found: dict[str, Any]) -> None:
        vars(scheduler).update(found.get("scheduler", {}))

    return single_file(with_optimizer, step=step, save=state, load=load)


for _kind in ("noam", "linear", "cyclic"):
    add(f"SpeechBrain {_kind}", _speechbrain(_kind))
add("SpeechBrain linear, not saved", _speechbrain("linear", saved=False))

# --- Detectron2 (solver/lr_scheduler.py): LRMultiplier saves `base_lrs` and `last_epoch`; WarmupMultiStepLR all of its fields


class LRMultiplier(L.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: Callable[[float], float], max_iter: int) -> None:
        self._multiplier, self._max_iter = multiplier, max_iter
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {"base_lrs": self.base_lrs, "last_epoch": self.last_epoch}

    def get_lr(self) -> list[float]:
        return [base * self._multiplier(self.last_epoch / self._max_iter) for base in self.base_lrs]


class WarmupMultiStepLR(L.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, milestones: list[int], gamma: float, warmup_iters: int) -> None:
        self.milestones, self.gamma, self.warmup_iters, self.warmup_factor = milestones, gamma, warmup_iters, 0.001
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        alpha = min(1.0, self.last_epoch / self.warmup_iters)
        warm = self.warmup_factor * (1 - alpha) + alpha
        return [base * warm * self.gamma ** sum(self.last_epoch >= m for m in self.milestones) for base in self.base_lrs]


add("Detectron2 LRMultiplier", single_file(
    lambda o, c: LRMultiplier(o, lambda x: 0.5 * (1 + math.cos(math.pi * x)), HORIZON),
    save=lambda s, c: {"scheduler": s.state_dict()}, load=lambda s, state: s.load_state_dict(state["scheduler"]),
    counter="iteration", name="model_0000019.pth"))  # fmt: skip
add("Detectron2 WarmupMultiStepLR", single_file(
    lambda o, c: WarmupMultiStepLR(o, [30, 50], 0.1, 25),
    save=lambda s, c: {"scheduler": s.state_dict()}, load=lambda s, state: s.load_state_dict(state["scheduler"]),
    counter="iteration"))  # fmt: skip

# --- AllenNLP (training/scheduler.py, learning_rate_schedulers/noam.py): fields like timm's, and a formula of its own


class AllenNoam(Plain):
    def __init__(self, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self.param_group_field, self._initial_param_group_field = "lr", "initial_lr"
        self.last_epoch, self.warmup_steps, self.model_size, self.lr = -1, 10, 512, config["lr"]
        self.base_values = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)
        del self.base_lrs

    def step(self) -> None:
        self.last_epoch += 1
        step = self.last_epoch + 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self.model_size**-0.5 * min(step**-0.5, step * self.warmup_steps**-1.5)


class AllenSlanted(AllenNoam):
    def step(self) -> None:
        self.last_epoch += 1
        for group, base in zip(self.optimizer.param_groups, self.base_values, strict=True):
            group["lr"] = base * (1 - self.last_epoch / HORIZON)


for _name, _class in (("NoamLR", AllenNoam), ("from base_values", AllenSlanted)):
    add(f"AllenNLP {_name}", single_file(
        lambda o, c, k=_class: k(o, c), save=lambda s, c: {"learning_rate_scheduler": s.state_dict()},  # type: ignore[misc]
        load=lambda s, state: s.load_state_dict(state["learning_rate_scheduler"])))  # fmt: skip

# --- ESPnet2 (espnet2/schedulers/warmup_lr.py, noam_lr.py): torch subclasses, saved in lists


class EspnetWarmupLR(L.LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        step = self.last_epoch + 1
        return [lr * self.warmup_steps**0.5 * min(step**-0.5, step * self.warmup_steps**-1.5) for lr in self.base_lrs]


class EspnetNoamLR(EspnetWarmupLR):
    def get_lr(self) -> list[float]:
        step = self.last_epoch + 1
        return [512**-0.5 * min(step**-0.5, step * self.warmup_steps**-1.5) for _ in self.base_lrs]


for _name, _espnet in (("WarmupLR", EspnetWarmupLR), ("NoamLR", EspnetNoamLR)):
    add(f"ESPnet {_name}", single_file(
        lambda o, c, k=_espnet: k(o, 10), save=lambda s, c: {"schedulers": [s.state_dict()], "reporter": {"epoch": 2}},  # type: ignore[misc]
        load=lambda s, state: s.load_state_dict(state["schedulers"][0])))  # fmt: skip


# --- icefall (zipformer/optim.py): Eden, `{base_lrs, epoch, batch}`; its `initial_lr` comes from the optimizer's groups


class Eden(Plain):
    epoch: int
    batch: int

    def factor(self) -> float:
        self.epoch, self.batch = self.n // 30, self.n
        warm = min(1.0, 0.5 + 0.5 * self.batch / 25)
        return ((self.batch**2 + 50**2) / 50**2) ** -0.25 * ((self.epoch**2 + 6**2) / 6**2) ** -0.25 * warm


add("icefall Eden", single_file(lambda o, c: Eden(o), save=lambda s, c: {"scheduler": s.state_dict(), "batch_idx_train": 20},
                                load=lambda s, state: s.load_state_dict(state["scheduler"])))  # fmt: skip
add("icefall Eden, its counters alone", single_file(
    lambda o, c: Eden(o), save=lambda s, c: {"scheduler": {"epoch": s.epoch, "batch": s.batch, "n": s.n}},
    load=lambda s, state: s.load_state_dict(state["scheduler"])))  # fmt: skip

# --- LR set in the loop from arguments that may be saved: CleanRL, OpenNMT-py, rl_games, YOLO, lucidrains


def _set(factor: Callable[[int], float]) -> Callable[[torch.optim.Optimizer, int, Config], None]:
    def before(optimizer: torch.optim.Optimizer, n: int, config: Config) -> None:
        for index, group in enumerate(optimizer.param_groups):
            group["lr"] = config["lr"] / (1 + index) * factor(n)

    return before


def _loop(**saved: Callable[[Config], Any]) -> Callable[[Path, Config, bool], Lrs]:
    return single_file(lambda o, c: None, step=lambda s, n: None, load=IGNORE, before=_set(lambda n: 1 - n / HORIZON),
                       save=lambda s, c: {name: make(c) for name, make in saved.items()})  # fmt: skip


add("CleanRL, args saved", _loop(args=lambda c: {"learning_rate": c["lr"], "anneal_lr": True, "num_envs": 8}))
add("CleanRL, nothing saved", _loop())
add("OpenNMT-py", _loop(opt=lambda c: {"learning_rate": c["lr"], "decay_method": "noam", "warmup_steps": 10}))
add("rl_games", _loop(frame=lambda c: 640, last_mean_rewards=lambda c: -1.5, env_state=lambda c: None))
add("YOLO last.pt", _loop(train_args=lambda c: {"lr0": c["lr"], "lrf": 0.01, "warmup_bias_lr": 0.1, "cos_lr": False}))
add("an epoch schedule as a list", _loop(hparams=lambda c: {"schedule": [[0, c["lr"]], [30, c["lr"] / 10]]}))
add("text alone", _loop(config=lambda c: f"optimizer.lr={c['lr']}"))
add("lucidrains, constant LR", single_file(lambda o, c: None, step=lambda s, n: None, save=NOTHING, load=IGNORE))


def _groups_initial(optimizer: torch.optim.Optimizer, n: int, config: Config) -> None:
    """nanochat (scripts/base_train.py): `group["lr"] = group["initial_lr"] * lrm`."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1 - n / HORIZON)


add("nanochat, from initial_lr", single_file(
    lambda o, c: None, step=lambda s, n: None, save=NOTHING, load=IGNORE, before=_groups_initial))  # fmt: skip

# --- a torch scheduler is saved, and something else decides


def _behind(optimizer: torch.optim.Optimizer, n: int, config: Config) -> None:
    """A script that keeps a torch scheduler for its logs and sets the LR itself."""
    for group in optimizer.param_groups:
        group["lr"] = config["lr"] * (0.9 ** (n // 10))


add("a scheduler that the loop overrides", single_file(lambda o, c: L.StepLR(o, 7, 0.5), before=_behind))
add("a loop that overrides it to the same LRs", shown=False, loop=single_file(
    lambda o, c: L.LambdaLR(o, lambda n: 1.0),
    before=lambda o, n, c: [g.update(lr=c["lr"]) for g in o.param_groups] and None))  # fmt: skip
add("a scheduler saved and not loaded", single_file(lambda o, c: L.CosineAnnealingLR(o, 60), load=lambda s, state: [
    s.step() for _ in range(SAVED_AT)] and None), shown=False)  # fmt: skip
add("SWALR beside a scheduler", single_file(
    lambda o, c: torch.optim.swa_utils.SWALR(o, swa_lr=c["lr"] / 3, anneal_epochs=30)))
add("a multiplier in the group", single_file(
    lambda o, c: [g.setdefault("lr_mult", 1.0) for g in o.param_groups] and L.StepLR(o, 12, 0.5)))
add("two schedulers stepped together", single_file(
    lambda o, c: (L.ExponentialLR(o, 0.99), L.StepLR(o, 12, 0.5)), step=lambda s, n: [x.step() for x in s] and None,
    save=lambda s, c: {"schedulers": [x.state_dict() for x in s]},
    load=lambda s, state: [x.load_state_dict(y) for x, y in zip(s, state["schedulers"], strict=True)] and None))  # fmt: skip
add("a scheduler and a warm-up of its own", single_file(
    lambda o, c: L.CosineAnnealingLR(o, 60),
    before=lambda o, n, c: [g.update(lr=c["lr"] * n / 40) for g in o.param_groups if n < 40] and None,
    save=lambda s, c: {"lr_scheduler": s.state_dict(), "warmup": {"steps": 40, "peak": c["lr"]}}))  # fmt: skip
add("gradual warm-up around torch", single_file(
    lambda o, c: Gradual(o, L.CosineAnnealingLR(o, 60)), save=lambda s, c: {"scheduler": s.state_dict()},
    load=lambda s, state: s.load_state_dict(state["scheduler"])))  # fmt: skip


class Gradual(L.LRScheduler):
    """ildoonet's GradualWarmupScheduler keeps the next scheduler as an object in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: Any) -> None:
        self.total_epoch, self.after_scheduler, self.multiplier = 30, after, 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.total_epoch:
            return list(self.after_scheduler.get_last_lr())
        return [lr * self.last_epoch / self.total_epoch for lr in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("optimizer", "after_scheduler")}


# --- objects instead of state dicts, lists of optimizers, other file names


def _whole(root: Path, config: Config, resumed: bool) -> Lrs:
    """`torch.save` of the scheduler and the optimizer themselves."""
    model, live = model_and(ADAMW, config["lr"])
    scheduler: Any = L.CosineAnnealingLR(live, 60)
    first, used = 0, []
    if resumed:
        state = torch.load(root / "ckpt_20.pt", weights_only=False)
        model, live, scheduler, first = state["model"], state["optimizer"], state["scheduler"], state["step"]
    for n in range(first, SAVED_AT + LATER_STEPS):
        used.append(one_step(model, live))
        scheduler.step()
        if n + 1 == SAVED_AT and not resumed:
            torch.save({"model": model, "optimizer": live, "scheduler": scheduler, "step": n + 1}, root / "ckpt_20.pt")
    return used[-LATER_STEPS:]


add("whole objects pickled", _whole)


def _lightning_like(root: Path, config: Config, resumed: bool) -> Lrs:
    """flair, AllenNLP and others: several files, one for each part, in one directory."""
    model, live = model_and(SGD, config["lr"])
    scheduler = L.OneCycleLR(live, [config["lr"], config["lr"] / 2], total_steps=HORIZON)
    folder, first, used = root / f"step_{SAVED_AT}", 0, []
    if resumed:
        live.load_state_dict(torch.load(folder / "optimizer.pt"))
        scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=False))
        first = SAVED_AT
    for n in range(first, SAVED_AT + LATER_STEPS):
        used.append(one_step(model, live))
        scheduler.step()
        if n + 1 == SAVED_AT and not resumed:
            folder.mkdir()
            torch.save(model.state_dict(), folder / "model.pt")
            torch.save(live.state_dict(), folder / "optimizer.pt")
            torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    return used[-LATER_STEPS:]


add("one file for each part", _lightning_like)


def _accelerated(root: Path, config: Config, resumed: bool) -> Lrs:
    """diffusers' examples and kohya's sd-scripts: `accelerator.save_state("checkpoint-20")` with diffusers' schedule."""
    accelerator = need("accelerate").Accelerator(cpu=True)
    model, live = model_and(ADAMW, config["lr"])
    get = need("diffusers.optimization").get_scheduler
    made = get(config["schedule"], live, num_warmup_steps=5, num_training_steps=HORIZON)
    model, live, scheduler = accelerator.prepare(model, live, made)
    folder, first, used = root / f"checkpoint-{SAVED_AT}", 0, []
    if resumed:
        accelerator.load_state(str(folder))
        first = SAVED_AT
    for n in range(first, SAVED_AT + LATER_STEPS):
        used.append(one_step(model, live))
        scheduler.step()
        if n + 1 == SAVED_AT and not resumed:
            accelerator.save_state(str(folder))
    return used[-LATER_STEPS:]


for _kind in ("cosine", "polynomial", "constant", "piecewise_constant"):
    if _kind != "piecewise_constant":
        add(f"diffusers {_kind}", _accelerated, schedule=_kind)


def _baselines(root: Path, config: Config, resumed: bool) -> Lrs:
    """Stable-Baselines3: a zip with `policy.optimizer.pth`; `learn` sets the LR from `lr_schedule` in every update."""
    ppo, gym = need("stable_baselines3").PPO, need("gymnasium")
    used: list[tuple[float, ...]] = []

    class Watched(ppo):  # type: ignore[misc, valid-type]
        def train(self) -> None:
            super().train()
            used.append((float(self.policy.optimizer.param_groups[0]["lr"]),))

    total, path = SAVED_AT + LATER_STEPS, root / f"rl_model_{SAVED_AT}_steps.zip"
    env = gym.make("CartPole-v1")
    settings = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "device": "cpu", "seed": 0}
    if resumed:
        model = Watched.load(path, env=env, device="cpu")
        model.learn(8 * LATER_STEPS, reset_num_timesteps=False)
    else:
        model = Watched("MlpPolicy", env, learning_rate=config["lr"], **settings)
        model.learn(8 * SAVED_AT)
        model.save(path)
        model.learn(8 * LATER_STEPS, reset_num_timesteps=False)
    assert total
    return used[-LATER_STEPS:]


add("Stable-Baselines3 zip", _baselines)


def _fastai(root: Path, config: Config, resumed: bool) -> Lrs:
    """fastai: `opt.state_dict()` is `{state, hypers}` (fastai/optimizer.py); `fit_one_cycle` sets `lr` in each batch."""
    module = need("fastai.optimizer")
    model = torch.nn.Linear(4, 1)
    live = module.Adam([[model.weight], [model.bias]], lr=config["lr"])
    path, first, used = root / "model_20.pth", 0, []
    if resumed:
        state = torch.load(path, weights_only=False)
        live.load_state_dict(state["opt"])
        first = SAVED_AT
    for n in range(first, SAVED_AT + LATER_STEPS):
        live.set_hyper("lr", config["lr"] * (1 - n / HORIZON))
        model(torch.ones(2, 4)).sum().backward()
        used.append(tuple(float(h["lr"]) for h in live.hypers))
        live.step()
        live.zero_grad()
        if n + 1 == SAVED_AT and not resumed:
            torch.save({"model": model.state_dict(), "opt": live.state_dict(), "step": n + 1}, path)
    return used[-LATER_STEPS:]


add("fastai", _fastai)


def _flair(kind: str) -> Callable[[Path, Config, bool], Lrs]:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        module = need("flair.optim")
        if kind == "linear":
            return module.LinearSchedulerWithWarmup(optimizer, num_train_steps=HORIZON, num_warmup_steps=8)
        return module.ExpAnnealLR(optimizer, config["lr"] / 100, HORIZON)

    return single_file(make)


for _kind in ("linear", "exponential"):
    add(f"flair {_kind}", _flair(_kind))


def _paddle(root: Path, config: Config, resumed: bool) -> Lrs:
    """PaddlePaddle: a pickle with `LR_Scheduler: {last_epoch, last_lr}` beside arrays."""
    import pickle

    import numpy as np

    path = root / f"step-{SAVED_AT}.pt"
    if resumed:
        state = pickle.loads(path.read_bytes())
        return [(state["LR_Scheduler"]["last_lr"] * 0.99**n,) for n in range(LATER_STEPS)]
    lr = config["lr"] * 0.99**SAVED_AT
    own = {"last_epoch": SAVED_AT, "last_lr": lr}
    path.write_bytes(pickle.dumps({"linear_0.w_0_moment1_0": np.zeros(3), "LR_Scheduler": own}))
    return [(lr * 0.99**n,) for n in range(LATER_STEPS)]


add("PaddlePaddle pickle", _paddle)
