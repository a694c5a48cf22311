"""The cases: how each writer trains, saves and resumes, with its own schedulers and loaders where its library is installed.

A case is trained twice: `train` saves at step 20 and returns the LRs of the 50 steps after it, `resume` loads the
checkpoint with the config that it is given and returns the LRs of its 50 steps. Both go through one function.
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler as L

SAVED_AT, LATER_STEPS = 20, 50
HORIZON = 100
Config = dict[str, Any]
Lrs = list[tuple[float, ...]]


class NotInstalled(Exception):
    """The library of a case is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One writer with one scheduler and one optimizer. `config` is what its launches are given.

    `loop(root, config, start)` trains: from the beginning and on after the save at step 20 where `start` is None, else
    from the checkpoint. `line` finds the changed arguments in a refusal; `by_name`: what a refusal must say where no
    change of an LR gives exactly half a step.
    """

    name: str
    loop: Callable[[Path, Config, bool], Lrs]
    config: Mapping[str, Any] = field(default_factory=lambda: {"lr": 1e-3})
    line: Callable[[Config, str, float], Config | None] | None = None
    by_name: str = ""
    shown: bool = True  # whether the checkpoint shows that its scheduler decides; False: the script saves one and ignores it
    free: bool = False  # any honest answer counts: nobody says here what a refusal must name
    argv: tuple[str, ...] = ()  # the command of its launch, recorded before the rollback; `config["argv"]` of the loop
    files: Mapping[str, str] = field(default_factory=dict)  # name -> text, beside the checkpoints

    def train(self, root: Path, config: Config) -> Lrs:
        """The control: 20 steps, a save, 50 steps."""
        return self._quiet(root, config, False)

    def resume(self, root: Path, config: Config) -> Lrs:
        """50 steps after the load."""
        return self._quiet(root, config, True)

    def apply(self, config: Config, text: str, scale: float) -> Config | None:
        """The config with the change that `text` asks for; None where it does not name one."""
        return (self.line or (launch_in if self.argv else options_in))(config, text, scale)

    def _quiet(self, root: Path, config: Config, resumed: bool) -> Lrs:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.loop(root, copy.deepcopy(config), resumed)


def options_in(config: Config, text: str, scale: float) -> Config | None:
    """Apply `--name value`, `--name=value` or "multiply it" of a refusal to the config."""
    changed = dict(config)
    found = False
    for name, value in re.findall(r"--([A-Za-z_\-]+)[= ]([0-9][-+0-9.e]*)", text):
        key = name.replace("-", "_")
        if key in config:
            changed[key], found = float(value), True
    return changed if found else by_factor(config, text, scale)


def launch_in(config: Config, text: str, scale: float) -> Config | None:
    """Apply the arguments, fields and lines of a refusal to the recorded command and its files, as a person would.

    Of several that are offered with "perhaps", all are changed.
    """
    import yaml

    words, found = list(config["argv"]), False
    for before, after in re.findall(r"`([^`]*)` → `([^`]*)`", text):
        old, new = before.split(" "), after.split(" ")
        at = next((i for i in range(len(words)) if words[i : i + len(old)] == old), None)
        if at is not None:
            words[at : at + len(old)], found = new, True
    for path, line, before, after in re.findall(r"`(/[^`]+)` line (\d+), `([^`]*)` → `([^`]*)`", text):
        rows = Path(path).read_text().splitlines(keepends=True)
        assert before in rows[int(line) - 1], (before, rows[int(line) - 1])
        rows[int(line) - 1] = rows[int(line) - 1].replace(before, after)
        Path(path).write_text("".join(rows))
        found = True
    for path, keys, before, after in re.findall(r"`(/[^`:]+):([^`]+)` ([-+0-9.e]+) → ([-+0-9.e]+)", text):
        rows = Path(path).read_text().splitlines(keepends=True)
        last = [key for key in keys.split(".") if not key.isdigit()][-1]
        for index, row in enumerate(rows):
            match = re.search(rf"[\"']?{re.escape(last)}[\"']?\s*[:=]\s*[\[\"']*([-+0-9.eE]+)", row)
            if match and float(match[1]) == float(before):
                number = repr(float(after))
                number = number if "." in number else number.replace("e-", ".0e-")
                rows[index] = row[: match.start(1)] + number + row[match.end(1) :]
                found = True
        Path(path).write_text("".join(rows))
        if path.endswith(("yaml", "yml")):
            yaml.safe_load(Path(path).read_text())
    return {**config, "argv": words} if found else None


def by_factor(config: Config, text: str, scale: float) -> Config | None:
    """Every LR of the script times the factor, where the refusal asks for that."""
    if f"multiply it by {scale:g} where your script sets it" not in text and "multiply the LR" not in text:
        return None
    held = [key for key in config if ("lr" in key or "learning_rate" in key) and isinstance(config[key], float)]
    return {**config, **{key: config[key] * scale for key in held}}


def need(name: str) -> Any:
    """Import a module; raises `NotInstalled`."""
    _stub_torchvision()
    try:
        return importlib.import_module(name)
    except Exception as problem:  # noqa: BLE001 - a library that does not import counts as absent, with the reason
        raise NotInstalled(f"{name.partition('.')[0]} ({type(problem).__name__}: {str(problem)[:60]})") from None


class _Anything(types.ModuleType):
    """Stands for torchvision, which timm imports for layers that no scheduler uses."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *a, **k: None}) if name[0].isupper() else _Anything(name)
        made = _Anything(name) if name == "InterpolationMode" else made
        setattr(self, name, made)
        return made

    def __hash__(self) -> int:
        return id(self)


def _stub_torchvision() -> None:
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    if importlib.util.find_spec("torchaudio") is None:
        sys.modules["torchaudio"] = _Anything("torchaudio")
        sys.modules["torchaudio"].__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"].__path__ = []
    names = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models", ".utils",
             ".models.feature_extraction", ".models.resnet", ".models.segmentation", ".models.detection", ".transforms.v2",
             ".transforms.v2.functional")  # fmt: skip
    for name in names:
        full = f"torchvision{name}"
        module = _Anything(full)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(full, None), []
        module.__version__ = "0.28.0"
        sys.modules[full] = module
        if name:
            setattr(sys.modules[full.rpartition(".")[0]], full.rpartition(".")[2], module)


# --- One loop for all that save one file

Optimizer = Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]
ADAMW: Optimizer = lambda groups, lr: torch.optim.AdamW(groups, lr=lr)  # noqa: E731
SGD: Optimizer = lambda groups, lr: torch.optim.SGD(groups, lr=lr, momentum=0.9)  # noqa: E731


def model_and(optimizer: Optimizer, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A linear layer with two parameter groups, the second at half the LR."""
    model = torch.nn.Linear(4, 1)
    groups = [{"params": [model.weight], "lr": lr}, {"params": [model.bias], "lr": lr / 2}]
    return model, optimizer(groups, lr)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """A training step; the LRs that it used."""
    if hasattr(optimizer, "train"):  # schedule-free ones have a mode
        optimizer.train()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    used = tuple(float(group["lr"]) for group in optimizer.param_groups)
    optimizer.step()
    return used


def single_file(
    make: Callable[[torch.optim.Optimizer, Config], Any],
    *,
    optimizer: Optimizer = ADAMW,
    step: Callable[[Any, int], None] = lambda scheduler, n: scheduler.step(),
    save: Callable[[Any, Config], dict[str, Any]] = lambda scheduler, config: {"lr_scheduler": scheduler.state_dict()},
    load: Callable[[Any, dict[str, Any]], None] = lambda scheduler, state: scheduler.load_state_dict(state["lr_scheduler"]),
    before: Callable[[torch.optim.Optimizer, int, Config], None] = lambda optimizer, n, config: None,
    name: str = "ckpt.pt",
    counter: str = "step",
) -> Callable[[Path, Config, bool], Lrs]:
    """A loop that saves model, optimizer, a counter and what `save` adds with one `torch.save`."""

    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        model, live = model_and(optimizer, config.get("lr", config.get("learning_rate", 1e-3)))
        scheduler = make(live, config)
        first, used = 0, []
        if resumed:
            state = torch.load(root / name, weights_only=False)
            model.load_state_dict(state["model"])
            live.load_state_dict(state["optimizer"])
            first = state[counter]
            load(scheduler, state)
        for n in range(first, SAVED_AT + LATER_STEPS):
            before(live, n, config)
            used.append(one_step(model, live))
            step(scheduler, n)
            if n + 1 == SAVED_AT and not resumed:
                state = {"model": model.state_dict(), "optimizer": live.state_dict(), counter: n + 1, **save(scheduler, config)}
                torch.save(state, root / name)
        return used[-LATER_STEPS:]

    return loop


NOTHING: Callable[[Any, Config], dict[str, Any]] = lambda scheduler, config: {}  # noqa: E731
IGNORE: Callable[[Any, Any], None] = lambda scheduler, state: None  # noqa: E731
CASES: list[Case] = []

# --- torch

_TORCH: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: L.StepLR(o, 12, 0.3),
    "MultiStepLR": lambda o: L.MultiStepLR(o, [5, 30, 40], 0.3),
    "ConstantLR": lambda o: L.ConstantLR(o, 0.3, 40),
    "LinearLR": lambda o: L.LinearLR(o, 0.1, 1.0, 50),
    "ExponentialLR": lambda o: L.ExponentialLR(o, 0.97),
    "PolynomialLR": lambda o: L.PolynomialLR(o, HORIZON, 2.0),
    "CosineAnnealingLR": lambda o: L.CosineAnnealingLR(o, 60, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: L.CosineAnnealingWarmRestarts(o, 12, 2, eta_min=1e-5),
    "OneCycleLR": lambda o: L.OneCycleLR(o, max_lr=[1e-3, 2e-3], total_steps=130),
    "CyclicLR": lambda o: L.CyclicLR(o, 1e-4, 1e-3, 6, cycle_momentum=False),
    "LambdaLR": lambda o: L.LambdaLR(o, lambda n: 0.99**n),
    "MultiplicativeLR": lambda o: L.MultiplicativeLR(o, lambda n: 0.97),
    "SequentialLR": lambda o: L.SequentialLR(o, [L.LinearLR(o, 0.1, 1.0, 12), L.CosineAnnealingLR(o, 60)], [12]),
    "ChainedScheduler": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.3, 12), L.ExponentialLR(o, 0.97)]),
}
for _name, _make in _TORCH.items():
    for _opt, _optimizer in (("AdamW", ADAMW), ("SGD", SGD)):
        CASES.append(Case(name=f"torch {_name} {_opt}", loop=single_file(lambda o, c, m=_make: m(o), optimizer=_optimizer)))


class _WarmCosine(L.CosineAnnealingLR):
    """A subclass with an int of its own, in which it computes otherwise."""

    def __init__(self, optimizer: Any, total: int, own: Any) -> None:
        self.own = own
        super().__init__(optimizer, total)

    def get_lr(self) -> list[float]:
        count = self.own if isinstance(self.own, int) else 5
        return [max(2e-4, base * (1 - self.last_epoch / 100) / (1 + count)) for base in self.base_lrs]


for _kind, _own in (("int", 5), ("dict", {"warmup": 5}), ("tensor", torch.tensor([5]))):
    CASES.append(
        Case(
            name=f"torch subclass with {_kind} of its own",
            loop=single_file(lambda o, c, w=_own: _WarmCosine(o, 60, w)),
            by_name="no known scheduler class",
        )
    )

_CONSTANT = single_file(lambda o, c: None, step=lambda s, n: None, save=NOTHING, load=IGNORE)
CASES += [
    Case(name="torch no scheduler, constant", loop=_CONSTANT, line=by_factor),
    Case(
        name="torch new scheduler at each launch",
        loop=single_file(
            lambda o, c: L.LambdaLR(o, lambda n: 0.99**n),
            save=NOTHING,
            load=lambda s, state: s.__dict__.update(last_epoch=state["step"]),
        ),
        line=by_factor,
    ),
]


def _odd(name: str, make: Optimizer, words: str) -> Case:
    loop = single_file(lambda o, c: L.LambdaLR(o, lambda n: 1.0), optimizer=make)
    return Case(name=f"optimizer {name}", loop=loop, by_name=words)


def _third(module: str, name: str) -> Optimizer:
    return lambda groups, lr: getattr(need(module), name)(groups, lr=lr)


CASES += [
    _odd("Rprop", lambda g, lr: torch.optim.Rprop(g, lr=lr), "Rprop"),
    _odd("ASGD", lambda g, lr: torch.optim.ASGD(g, lr=lr), "ASGD"),
    _odd("schedulefree AdamW", _third("schedulefree", "AdamWScheduleFree"), "schedule-free"),
    _odd("schedulefree SGD", _third("schedulefree", "SGDScheduleFree"), "schedule-free"),
    _odd("Prodigy", lambda g, lr: _third("prodigyopt", "Prodigy")([{"params": g[0]["params"]}], lr), "Prodigy"),
]
for _name, _make in (
    ("Adagrad", lambda g, lr: torch.optim.Adagrad(g, lr=lr, lr_decay=0.01)),
    ("RMSprop", lambda g, lr: torch.optim.RMSprop(g, lr=lr)),
    ("RAdam", lambda g, lr: torch.optim.RAdam(g, lr=lr)),
    ("Adafactor", lambda g, lr: torch.optim.Adafactor(g, lr=lr)),
    ("Adadelta", lambda g, lr: torch.optim.Adadelta(g, lr=lr)),
):
    CASES.append(
        Case(name=f"optimizer {_name}", loop=single_file(lambda o, c: L.CosineAnnealingLR(o, 60), optimizer=_make))
    )

# --- nanoGPT: the LR of every iteration is computed from the config; loop and checkpoint rebuilt after its train.py


def _nanogpt_lr(n: int, config: Config) -> float:
    import math

    if not config["decay_lr"]:
        return float(config["learning_rate"])
    if n < config["warmup_iters"]:
        return float(config["learning_rate"] * (n + 1) / (config["warmup_iters"] + 1))
    ratio = (n - config["warmup_iters"]) / (HORIZON - config["warmup_iters"])
    return float(config["min_lr"] + 0.5 * (1 + math.cos(math.pi * ratio)) * (config["learning_rate"] - config["min_lr"]))


def _set_all(optimizer: torch.optim.Optimizer, n: int, config: Config) -> None:
    for group in optimizer.param_groups:
        group["lr"] = _nanogpt_lr(n, config)


for _label, _decay, _warm in (("cosine", True, 5), ("still warming up", True, 60), ("constant", False, 0)):
    CASES.append(
        Case(
            name=f"nanoGPT {_label}",
            config={"learning_rate": 6e-4, "min_lr": 6e-5, "decay_lr": _decay, "warmup_iters": _warm},
            loop=single_file(
                lambda o, c: None,
                step=lambda s, n: None,
                save=lambda s, c: {"config": c, "model_args": {"n_layer": 1}, "best_val_loss": 1.0},
                load=IGNORE,
                before=_set_all,
                counter="iter_num",
            ),
        )
    )

# --- timm


def _timm(name: str, **arguments: Any) -> Callable[[torch.optim.Optimizer, Config], Any]:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        return getattr(need("timm.scheduler"), name)(optimizer, t_in_epochs=False, **arguments)

    return make


_TIMM = {
    "CosineLRScheduler": {"t_initial": HORIZON, "lr_min": 1e-5, "warmup_t": 5, "warmup_lr_init": 1e-6},
    "CosineLRScheduler warming up": {"t_initial": HORIZON, "lr_min": 1e-5, "warmup_t": 40, "warmup_lr_init": 1e-6},
    "StepLRScheduler": {"decay_t": 12, "decay_rate": 0.5},
    "MultiStepLRScheduler": {"decay_t": [10, 40], "decay_rate": 0.5},
    "TanhLRScheduler": {"t_initial": HORIZON, "lr_min": 1e-5},
    "PolyLRScheduler": {"t_initial": HORIZON, "lr_min": 1e-5},
    "CosineLRScheduler with noise": {"t_initial": HORIZON, "noise_range_t": [10, 60]},
}
for _name, _arguments in _TIMM.items():
    CASES.append(
        Case(
            name=f"timm {_name}, state in the file",
            loop=single_file(
                _timm(_name.split()[0], **_arguments), optimizer=SGD, step=lambda s, n: s.step_update(n + 1)
            ),
        )
    )


def _timm_script(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    timm = need("timm.scheduler")
    arguments = {"t_initial": HORIZON, "lr_min": config["min_lr"], "warmup_t": 30, "warmup_lr_init": config["warmup_lr"]}
    return timm.CosineLRScheduler(optimizer, t_in_epochs=False, **arguments)


def _namespace(config: Config) -> Any:
    from argparse import Namespace

    return Namespace(**config)


CASES += [
    Case(
        name="timm train.py, scheduler from arguments",
        config={"lr": 1e-3, "min_lr": 1e-5, "warmup_lr": 1e-6, "sched": "cosine", "opt": "adamw"},
        loop=single_file(
            _timm_script,
            step=lambda s, n: s.step_update(n + 1),
            save=lambda s, c: {"args": _namespace(c), "arch": "vit"},
            load=lambda s, state: s.step_update(state["step"]),
        ),
    ),
    Case(
        name="timm PlateauLRScheduler",
        loop=single_file(
            lambda o, c: need("timm.scheduler").PlateauLRScheduler(o, patience_t=1, decay_rate=0.5),
            step=lambda s, n: s.step(n, metric=1.0),
        ),
        by_name="looks like the state of a scheduler",
    ),
]

# --- mmengine

_MM: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 12, "gamma": 0.5},
    "MultiStepLR": {"milestones": [10, 40], "gamma": 0.5},
    "ConstantLR": {"factor": 0.3, "end": 40},
    "ExponentialLR": {"gamma": 0.97},
    "CosineAnnealingLR": {"T_max": 100, "eta_min": 1e-5},
    "CosineAnnealingLR with a ratio": {"T_max": 100, "eta_min_ratio": 0.1},
    "LinearLR": {"start_factor": 0.1, "end": 50},
    "PolyLR": {"eta_min": 1e-5, "power": 2.0, "end": 100},
    "OneCycleLR": {"eta_max": 1e-3, "total_steps": 130},
}
for _name, _arguments in _MM.items():
    CASES.append(
        Case(
            name=f"mmengine {_name}",
            loop=single_file(
                lambda o, c, n=_name, a=_arguments: getattr(need("mmengine.optim"), n.split()[0])(o, by_epoch=False, **a),
                optimizer=SGD,
                save=lambda s, c: {"param_schedulers": [s.state_dict()]},
                load=lambda s, state: s.load_state_dict(state["param_schedulers"][0]),
            ),
        )
    )

# --- Megatron-core: one file as `torch` writes it, with the arguments of the launch


def _megatron(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    module = need("megatron.core.optimizer_param_scheduler")
    return module.OptimizerParamScheduler(
        optimizer, init_lr=config["lr_warmup_init"], max_lr=config["lr"], min_lr=config["min_lr"],
        lr_warmup_steps=config["lr_warmup_steps"], lr_decay_steps=HORIZON, lr_decay_style=config["lr_decay_style"],
        start_wd=0.1, end_wd=0.1, wd_incr_steps=HORIZON, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=config["use_checkpoint_opt_param_scheduler"],
        override_opt_param_scheduler=config["override_opt_param_scheduler"],
    )  # fmt: skip


for _style in ("cosine", "linear", "constant", "inverse-square-root"):
    for _mode, _use, _override in (("file", True, False), ("override", False, True), ("equal", False, False)):
        CASES.append(
            Case(
                name=f"Megatron {_style}, {_mode}",
                config={
                    "lr": 1e-3, "min_lr": 1e-5, "lr_warmup_init": 0.0, "lr_warmup_steps": 5, "lr_decay_style": _style,
                    "use_checkpoint_opt_param_scheduler": _use, "override_opt_param_scheduler": _override,
                },
                loop=single_file(
                    _megatron,
                    step=lambda s, n: s.step(1),
                    save=lambda s, c: {"opt_param_scheduler": s.state_dict(), "args": _namespace(c)},
                    load=lambda s, state: s.load_state_dict(state["opt_param_scheduler"]),
                    counter="iteration",
                ),
            )
        )  # fmt: skip
CASES.append(
    Case(
        name="Megatron warming up from an LR, file",
        config={
            "lr": 1e-3, "min_lr": 1e-5, "lr_warmup_init": 1e-6, "lr_warmup_steps": 40, "lr_decay_style": "cosine",
            "use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": False,
        },
        loop=single_file(
            _megatron,
            step=lambda s, n: s.step(1),
            save=lambda s, c: {"opt_param_scheduler": s.state_dict(), "args": _namespace(c)},
            load=lambda s, state: s.load_state_dict(state["opt_param_scheduler"]),
            counter="iteration",
        ),
    )
)  # fmt: skip

# --- torchtitan: a DCP directory; the scheduler's state is its counter alone


def _titan(decay: str) -> Callable[[Path, Config, bool], Lrs]:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
            set_optimizer_state_dict,
        )

        module = need("torchtitan.components.optimizer.lr_scheduler")
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        model = torch.nn.Linear(4, 1)
        live = torch.optim.AdamW(model.parameters(), lr=config["lr"])
        settings = module.LRSchedulersContainer.Config(warmup_steps=5, decay_type=decay, min_lr_factor=0.1)
        scheduler = settings.build(optimizers=[live], training_steps=HORIZON)
        first, used, path = 0, [], root / f"step-{SAVED_AT}"
        if resumed:
            one_step(model, live)
            state = {
                "model": model.state_dict(),
                "optimizer": get_optimizer_state_dict(model, live, options=flat),
                "lr_scheduler": scheduler.state_dict(),
                "train_state": {"step": torch.tensor(0)},
            }
            dcp.load(state, checkpoint_id=str(path))
            set_optimizer_state_dict(model, live, state["optimizer"], options=flat)
            scheduler.load_state_dict(state["lr_scheduler"])
            first = int(state["train_state"]["step"])
        for n in range(first, SAVED_AT + LATER_STEPS):
            used.append(one_step(model, live))
            scheduler.step()
            if n + 1 == SAVED_AT and not resumed:
                state = {
                    "model": model.state_dict(),
                    "optimizer": get_optimizer_state_dict(model, live, options=flat),
                    "lr_scheduler": scheduler.state_dict(),
                    "train_state": {"step": torch.tensor(n + 1)},
                }
                dcp.save(state, checkpoint_id=str(path))
        return used[-LATER_STEPS:]

    return loop


def _titan_line(config: Config, text: str, scale: float) -> Config | None:
    found = re.search(r"`optimizer\.lr` ([0-9.e+\-]+) → ([0-9.e+\-]+)", text)
    return {**config, "lr": float(found[2])} if found and float(found[1]) == config["lr"] else None


for _decay in ("linear", "sqrt", "cosine"):
    CASES.append(Case(name=f"torchtitan {_decay}", loop=_titan(_decay), config={"lr": 8e-4}, line=_titan_line))

# --- fairseq: its schedulers, loaded without the package around them (it does not import under Python 3.11)


def _fairseq_module(name: str) -> Any:
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files("fairseq") or []
    except PackageNotFoundError:
        raise NotInstalled("fairseq") from None
    at = next(Path(str(f.locate())) for f in listed if str(f) == f"fairseq/optim/lr_scheduler/{name}.py")
    need("omegaconf")

    def register(*_: Any, **__: Any) -> Callable[[type], type]:
        return lambda cls: cls

    class FairseqOptimizer:
        pass

    parts = {
        "fairseq": {},
        "fairseq.dataclass": {"FairseqDataclass": object, "ChoiceEnum": lambda names: str},
        "fairseq.dataclass.utils": {"gen_parser_from_dataclass": None},
        "fairseq.optim": {"FairseqOptimizer": FairseqOptimizer},
    }
    for full, content in parts.items():
        if full not in sys.modules:
            module = types.ModuleType(full)
            module.__dict__.update(content)
            sys.modules[full] = module
    if "fairseq.optim.lr_scheduler" not in sys.modules:
        package = types.ModuleType("fairseq.optim.lr_scheduler")
        package.__path__ = [str(at.parent)]  # type: ignore[attr-defined]
        sys.modules["fairseq.optim.lr_scheduler"] = package
        base = importlib.import_module("fairseq.optim.lr_scheduler.fairseq_lr_scheduler")
        package.FairseqLRScheduler = base.FairseqLRScheduler  # type: ignore[attr-defined]
        package.register_lr_scheduler = register  # type: ignore[attr-defined]
    return importlib.import_module(f"fairseq.optim.lr_scheduler.{name}")


def _fairseq(name: str, kind: str, **arguments: Any) -> Case:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        module = _fairseq_module(name)

        class Wrapped(sys.modules["fairseq.optim"].FairseqOptimizer):  # type: ignore[name-defined,misc]
            def set_lr(self, lr: float) -> None:
                for group in optimizer.param_groups:
                    group["lr"] = lr

            def get_lr(self) -> float:
                return float(optimizer.param_groups[0]["lr"])

        return getattr(module, kind)(_namespace({**arguments, **config, "lr": [config["lr"]]}), Wrapped())

    def load(scheduler: Any, state: dict[str, Any]) -> None:
        scheduler.load_state_dict(state["optimizer_history"][-1]["lr_scheduler_state"])
        scheduler.step_update(state["num_updates"])

    def save(scheduler: Any, config: Config) -> dict[str, Any]:
        history = [{"lr_scheduler_state": scheduler.state_dict(), "num_updates": SAVED_AT, "optimizer_name": "FairseqAdam"}]
        cfg = {"optimization": {**arguments, **config, "lr": [config["lr"]], "update_freq": [1], "max_update": HORIZON}}
        return {"optimizer_history": history, "cfg": cfg}

    limits = ("warmup_init_lr", "end_learning_rate", "min_lr", "max_lr")
    extra = {key: value for key, value in arguments.items() if key in limits}
    return Case(
        name=f"fairseq {name}",
        config={"lr": 5e-4, **extra},
        loop=single_file(
            make, step=lambda s, n: s.step_update(n + 1), save=save, load=load, counter="num_updates", name="checkpoint_last.pt"
        ),
    )


CASES += [
    _fairseq("inverse_square_root_schedule", "InverseSquareRootSchedule", warmup_updates=5, warmup_init_lr=1e-7),
    _fairseq("polynomial_decay_schedule", "PolynomialDecayLRSchedule", warmup_updates=5, force_anneal=None,
             end_learning_rate=1e-6, power=1.0, total_num_update=HORIZON),
    _fairseq("cosine_lr_scheduler", "CosineLRSchedule", warmup_updates=5, warmup_init_lr=1e-7, max_update=HORIZON,
             min_lr=1e-6, t_mult=1, lr_period_updates=HORIZON, lr_shrink=0.1),
]  # fmt: skip


# --- Composer's schedulers are torch LambdaLRs, saved in a container of its own


def _composer(name: str, **arguments: Any) -> Case:
    def make(optimizer: torch.optim.Optimizer, config: Config) -> Any:
        module = need("composer.optim.scheduler")
        schedule = getattr(module, name)(**arguments)
        return L.LambdaLR(optimizer, lambda n: float(_composer_factor(schedule, n)))

    return Case(
        name=f"Composer {name}",
        loop=single_file(
            make,
            save=lambda s, c: {"state": {"schedulers": {"LambdaLR": s.state_dict()}}, "rng": []},
            load=lambda s, state: s.load_state_dict(state["state"]["schedulers"]["LambdaLR"]),
        ),
    )


def _composer_factor(schedule: Any, n: int) -> float:
    need("composer")
    from composer.core import Time, Timestamp

    length = Time(HORIZON, "ba")
    state = types.SimpleNamespace(timestamp=Timestamp(batch=n), max_duration=length, dataloader_len=length)
    return float(schedule(state, 1.0))


CASES += [_composer("CosineAnnealingScheduler", t_max="100ba", alpha_f=0.1), _composer("ConstantScheduler")]

# --- Lightning and transformers, by their own Trainers


def _lightning(scheduled: bool) -> Callable[[Path, Config, bool], Lrs]:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        pl = need("lightning.pytorch")
        used: Lrs = []

        class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.save_hyperparameters({"lr": config["lr"]})
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, index: int) -> Any:
                used.append(tuple(float(g["lr"]) for g in self.optimizers().param_groups))
                return self.layer(batch[0]).sum()

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(self.parameters(), lr=config["lr"])
                if not scheduled:
                    return optimizer
                schedule = {"scheduler": L.CosineAnnealingLR(optimizer, HORIZON), "interval": "step"}
                return {"optimizer": optimizer, "lr_scheduler": schedule}

        def trainer(steps: int) -> Any:
            return pl.Trainer(max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False, max_epochs=-1)  # fmt: skip

        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(200, 4)), batch_size=2)
        path = root / f"epoch=0-step={SAVED_AT}.ckpt"
        if resumed:
            trainer(SAVED_AT + LATER_STEPS).fit(Module(), data, ckpt_path=str(path), weights_only=False)
            return used[-LATER_STEPS:]
        first = trainer(SAVED_AT)
        first.fit(Module(), data)
        first.save_checkpoint(path)
        used.clear()
        trainer(SAVED_AT + LATER_STEPS).fit(Module(), data, ckpt_path=str(path), weights_only=False)
        return used[-LATER_STEPS:]

    return loop


def _transformers(kind: str, **more: Any) -> Callable[[Path, Config, bool], Lrs]:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        hf = need("transformers")
        used: Lrs = []

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x: Any, labels: Any = None) -> Any:
                return {"loss": self.layer(x).sum(), "logits": self.layer(x)}

        class Seen(hf.TrainerCallback):  # type: ignore[name-defined,misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **live: Any) -> None:
                used.append(tuple(float(g["lr"]) for g in live["optimizer"].param_groups))

        arguments = hf.TrainingArguments(
            output_dir=str(root), max_steps=SAVED_AT + LATER_STEPS, per_device_train_batch_size=2, learning_rate=config["lr"],
            lr_scheduler_type=kind, save_steps=SAVED_AT, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1000,
            warmup_steps=5, save_total_limit=None, **more,
        )  # fmt: skip
        data = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 400
        trainer = hf.Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Seen()])
        path = root / f"checkpoint-{SAVED_AT}"
        trainer.train(resume_from_checkpoint=str(path) if resumed else None)
        return used[-LATER_STEPS:]

    return loop


CASES += [
    Case(name="Lightning CosineAnnealingLR", loop=_lightning(True)),
    Case(name="Lightning without a scheduler", loop=_lightning(False), line=by_factor),
    Case(name="transformers cosine", loop=_transformers("cosine")),
    Case(name="transformers linear", loop=_transformers("linear")),
    Case(name="transformers adafactor", loop=_transformers("constant", optim="adafactor")),
]


# --- Others that compute their LR in the loop, or keep a scheduler of their own shape


class _PytorchWarmup:
    """As `pytorch_warmup`: a second state beside torch's scheduler, that dampens the LR."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self.scheduler, self.optimizer, self.last_step = L.CosineAnnealingLR(optimizer, HORIZON), optimizer, 0

    def step(self) -> None:
        self.scheduler.step()
        self.last_step += 1


class _OwnSchedule:
    """A schedule of a script: state with names of its own, the peak from the arguments."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self.optimizer, self.peak_lr, self.n = optimizer, config["lr"], 0

    def step(self) -> None:
        self.n += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak_lr * (1 - self.n / HORIZON)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


CASES += [
    Case(
        name="own schedule, counter in `schedule`",
        loop=single_file(
            _OwnSchedule,
            save=lambda s, c: {"schedule": s.state_dict()},
            load=lambda s, state: s.load_state_dict(state["schedule"]),
        ),
        by_name="`ckpt.pt:schedule` looks like the state of a scheduler",
    ),
    Case(
        name="own schedule, counter without a name",
        loop=single_file(
            _OwnSchedule, save=lambda s, c: {"extra": s.state_dict()}, load=lambda s, state: s.load_state_dict(state["extra"])
        ),
        line=by_factor,
    ),
    Case(
        name="torch scheduler and a warm-up of its own",
        loop=single_file(
            _PytorchWarmup,
            save=lambda s, c: {"lr_scheduler": s.scheduler.state_dict(), "warmup_scheduler": {"last_step": s.last_step}},
            load=lambda s, state: s.scheduler.load_state_dict(state["lr_scheduler"]),
        ),
        by_name="warmup_scheduler` looks like",
    ),
]
