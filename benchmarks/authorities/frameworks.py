"""Frameworks by their own schedulers, savers and loaders, each with its own config. They play where their package is installed.

python -m benchmarks.authorities frameworks
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.authorities.strangers import Loop, after
from benchmarks.authorities.writers import (
    ADAMW,
    HORIZON,
    LATER_STEPS,
    SAVED_AT,
    Case,
    Config,
    Lrs,
    model_and,
    need,
    one_step,
)

FRAMEWORKS: list[Case] = []
TOTAL = SAVED_AT + LATER_STEPS


def add(name: str, loop: Loop, argv: str = "", files: dict[str, str] | None = None, **more: Any) -> None:
    """A case whose launch is this command, with these files beside the checkpoints."""
    FRAMEWORKS.append(Case(name=name, loop=loop, argv=tuple(argv.split()), files=files or {}, config={}, **more))


def yaml_of(root: Path, config: Config, option: str = "--config") -> Any:
    """The config of the recorded command, read by OmegaConf, its dotted overrides merged in."""
    omega = need("omegaconf").OmegaConf
    words = config["argv"]
    dotted = [word.lstrip("-") for word in words if "=" in word and not word.startswith(option)]
    return omega.merge(omega.load(root / after(words, option)), omega.from_dotlist(dotted))


# --- torchtune (recipes/full_finetune_single_device.py): no scheduler is saved. A new one is made with `last_epoch` and takes
# the `initial_lr` of the optimizer's groups, which were loaded. Optimizer and counters lie in `recipe_state.pt`.


def _torchtune(root: Path, config: Config, resumed: bool) -> Lrs:
    training, made = need("torchtune.training"), yaml_of(root.parent, config)
    instantiate = need("torchtune.config").instantiate
    model = torch.nn.Linear(4, 1)
    seed = root.parent / "base" / "first.pt"
    if not resumed:
        seed.parent.mkdir()
        torch.save({"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}, seed)
    keeper = training.FullModelTorchTuneCheckpointer(
        checkpoint_dir=str(seed.parent),
        checkpoint_files=[f"epoch_0/{p.name}" for p in (root / "out" / "epoch_0").glob("*.bin")] if resumed else ["first.pt"],
        model_type="LLAMA3", output_dir=str(root / "out"), should_load_recipe_state=resumed,
        recipe_checkpoint="recipe_state/recipe_state.pt" if resumed else None,
    )  # fmt: skip
    held = keeper.load_checkpoint()
    model.load_state_dict(held[training.MODEL_KEY])
    live = instantiate(made.optimizer, model.parameters())
    first, used, schedule = 0, [], None
    if resumed:
        live.load_state_dict(held[training.OPT_KEY])
        first = held[training.EPOCHS_KEY] * held[training.MAX_STEPS_KEY]
    if "lr_scheduler" in made:
        schedule = instantiate(made.lr_scheduler, live, num_training_steps=HORIZON, last_epoch=first - 1)
    for n in range(first, TOTAL):
        used.append(one_step(model, live))
        if schedule is not None:
            schedule.step()
        if n + 1 == SAVED_AT and not resumed:
            state = {
                training.MODEL_KEY: model.state_dict(), training.SEED_KEY: 1, training.EPOCHS_KEY: 1,
                training.TOTAL_EPOCHS_KEY: 4, training.MAX_STEPS_KEY: SAVED_AT, training.OPT_KEY: live.state_dict(),
            }  # fmt: skip
            keeper.save_checkpoint(state, epoch=0, intermediate_checkpoint=True)
    return used[-LATER_STEPS:]


_TUNE = "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\nmax_steps_per_epoch: 20\n"
_COSINE = (
    "lr_scheduler:\n  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup\n  num_warmup_steps: 5\n"
)
add(
    "torchtune, cosine",
    _torchtune,
    "tune run full_finetune_single_device --config t.yaml",
    {"t.yaml": _TUNE + _COSINE},
)
add("torchtune, constant", _torchtune, "tune run full_finetune_single_device --config t.yaml", {"t.yaml": _TUNE})
add("torchtune, override", _torchtune, "tune run full_finetune_single_device --config t.yaml optimizer.lr=1e-4",
    {"t.yaml": _TUNE + _COSINE})  # fmt: skip

# --- litgpt (litgpt/pretrain.py `fit`): `get_lr(optimizer.defaults["lr"], iter_num, …, train.min_lr)` in every iteration


def _litgpt(root: Path, config: Config, resumed: bool) -> Lrs:
    pretrain, made = need("litgpt.pretrain"), yaml_of(root.parent, config)
    fabric = need("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(torch.nn.Linear(4, 1))
    given = need("omegaconf").OmegaConf.to_container(made.optimizer)
    live = need("litgpt.utils").instantiate_torch_optimizer(given, model.parameters())
    live = fabric.setup_optimizers(live)
    state = {"model": model, "optimizer": live, "iter_num": 0, "step_count": 0}
    path = root / f"step-{SAVED_AT:08d}" / "lit_model.pth"
    used: Lrs = []
    if resumed:
        fabric.load(path, state)
    while state["iter_num"] < TOTAL:
        lr = pretrain.get_lr(live.defaults["lr"], state["iter_num"], 5, HORIZON, made.train.min_lr)
        for group in live.param_groups:
            group["lr"] = lr
        state["iter_num"] += 1
        used.append(one_step(model, live))
        state["step_count"] += 1
        if state["iter_num"] == SAVED_AT and not resumed:
            path.parent.mkdir(parents=True)
            fabric.save(path, state)
            need("omegaconf").OmegaConf.save(made, path.parent / "hyperparameters.yaml")  # as `save_hyperparameters`: in effect
    return used[-LATER_STEPS:]


_LIT = (
    "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 4e-4\ntrain:\n  min_lr: 4e-5\n  lr_warmup_steps: 5\n"
)
add("litgpt pretrain", _litgpt, "litgpt pretrain pythia-14m --config p.yaml", {"p.yaml": _LIT})
add("litgpt pretrain, overrides", _litgpt,
    "litgpt pretrain pythia-14m --config p.yaml --optimizer.init_args.lr=1e-3 --train.min_lr=1e-4",
    {"p.yaml": _LIT})  # fmt: skip

# --- OLMo-core (olmo_core/optim/config.py): `initial_lr` is a fixed field, put back after the load; `lr` is set from it


def _olmo(kind: str) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        optim, keep = need("olmo_core.optim"), need("olmo_core.distributed.checkpoint")
        made = yaml_of(root.parent, config)
        model = torch.nn.Linear(4, 1)
        live = optim.AdamWConfig(lr=float(made.train_module.optim.lr)).build(model)
        schedule = {
            "cosine": lambda: optim.CosWithWarmup(warmup_steps=5), "linear": lambda: optim.LinearWithWarmup(warmup_steps=5),
            "WSD": lambda: optim.WSD(warmup_steps=5, decay_steps=40, decay_fraction=None),
            "constant": lambda: optim.ConstantScheduler(),
        }[kind]()  # fmt: skip
        folder, first, used = root / f"step{SAVED_AT}", 0, []
        if resumed:
            keep.load_model_and_optim_state(str(folder / "model_and_optim"), model, live)
            first = torch.load(folder / "train" / "rank0.pt", weights_only=False)["global_step"]
        for n in range(first, TOTAL):
            trainer = types.SimpleNamespace(global_step=n + 1, max_steps=HORIZON)
            for group in live.param_groups:
                schedule.set_lr(group, trainer)
            used.append(one_step(model, live))
            if n + 1 == SAVED_AT and not resumed:
                keep.save_model_and_optim_state(str(folder / "model_and_optim"), model, live)
                (folder / "train").mkdir()
                torch.save({"global_step": n + 1, "epoch": 1, "max_steps": HORIZON}, folder / "train" / "rank0.pt")
                (folder / ".metadata.json").write_text('{"version": "2.0"}')
        return used[-LATER_STEPS:]

    return loop


for _kind in ("cosine", "linear", "WSD", "constant"):
    add(f"OLMo-core {_kind}", _olmo(_kind), "torchrun train.py --config o.yaml", {
        "o.yaml": "train_module:\n  optim:\n    lr: 3e-4\n"})  # fmt: skip

# --- ESPnet (espnet2/train/trainer.py `resume`): optimizers and schedulers are loaded from lists


def _espnet(module: str, name: str, **arguments: Any) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        made = yaml_of(root.parent, config)
        trainer, reporter = need("espnet2.train.trainer").Trainer, need("espnet2.train.reporter").Reporter(1)
        model, live = model_and(ADAMW, float(made.optim_conf.lr))
        schedule = getattr(need(f"espnet2.schedulers.{module}"), name)(live, **arguments)
        path, first, used = root / "checkpoint.pth", 0, []
        if resumed:
            trainer.resume(path, model, reporter, [live], [schedule], None)
            first = SAVED_AT
        for n in range(first, TOTAL):
            used.append(one_step(model, live))
            schedule.step()
            if n + 1 == SAVED_AT and not resumed:
                torch.save({
                    "model": model.state_dict(), "reporter": reporter.state_dict(), "optimizers": [live.state_dict()],
                    "schedulers": [schedule.state_dict()], "scaler": None,
                }, path)  # fmt: skip
        return used[-LATER_STEPS:]

    return loop


_ESP = {"e.yaml": "optim: adam\noptim_conf:\n  lr: 0.002\nscheduler: warmuplr\n"}
add(
    "ESPnet trainer, WarmupLR",
    _espnet("warmup_lr", "WarmupLR", warmup_steps=10),
    "python -m espnet2.bin.asr_train --config e.yaml",
    _ESP,
)
add(
    "ESPnet trainer, NoamLR",
    _espnet("noam_lr", "NoamLR", warmup_steps=10),
    "python -m espnet2.bin.asr_train --config e.yaml",
    _ESP,
)
add("ESPnet trainer, PiecewiseLinearWarmupLR", _espnet(
    "piecewise_linear_warmup_lr", "PiecewiseLinearWarmupLR", warmup_steps_list=[0, 10, 40], warmup_lr_list=[0.0, 1e-3, 2e-3]),
    "python -m espnet2.bin.asr_train --config e.yaml", _ESP)  # fmt: skip
add(
    "ESPnet trainer, torch's StepLR",
    lambda r, c, s: _espnet_torch(r, c, s),
    "python -m espnet2.bin.asr_train --config e.yaml",
    _ESP,
)


def _espnet_torch(root: Path, config: Config, resumed: bool) -> Lrs:
    sys.modules.setdefault("espnet2.schedulers.torchs", torch.optim.lr_scheduler)
    need("espnet2.train.trainer")
    return _espnet("torchs", "StepLR", step_size=12, gamma=0.5)(root, config, resumed)


# --- SpeechBrain (speechbrain/utils/checkpoints.py `Checkpointer`): a directory a checkpoint, one file for each part


def _speechbrain(kind: str) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        keep, schedulers = need("speechbrain.utils.checkpoints"), need("speechbrain.nnet.schedulers")
        made = yaml_of(root.parent, config)
        model, live = model_and(ADAMW, float(made.lr))
        if kind == "noam":
            schedule = schedulers.NoamScheduler(float(made.lr), 8)
        elif kind == "new bob":
            schedule = schedulers.NewBobScheduler(float(made.lr), annealing_factor=0.8)
        else:
            schedule = schedulers.CyclicLRScheduler(base_lr=float(made.lr) / 10, max_lr=float(made.lr), step_size=15)
        counter = need("speechbrain.utils.epoch_loop").EpochCounter(limit=TOTAL)
        keeper = keep.Checkpointer(root, {"model": model, "optimizer": live, "scheduler": schedule, "counter": counter})
        first, used = 0, []
        if resumed:
            keeper.recover_if_possible()
            first = counter.current
        for n in range(first, TOTAL):
            counter.current = n + 1
            used.append(one_step(model, live))
            if kind == "noam":
                schedule(live)
            elif kind == "new bob":
                _, lr = schedule(1.0)
                schedulers.update_learning_rate(live, lr)
            else:
                schedule.on_batch_end(live)
            if n + 1 == SAVED_AT and not resumed:
                keeper.save_checkpoint(meta={"step": n + 1}, name=f"step_{SAVED_AT}")
        return used[-LATER_STEPS:]

    return loop


for _kind in ("noam", "new bob", "cyclic"):
    add(
        f"SpeechBrain checkpointer, {_kind}",
        _speechbrain(_kind),
        "python train.py --config h.yaml",
        {"h.yaml": "lr: 1e-3\n"},
        )

# --- mmengine's Runner, by its own config dict and hooks


def _mmengine(sched: dict[str, Any] | None) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        runner_of, model_of = need("mmengine.runner").Runner, need("mmengine.model").BaseModel
        hook_of = need("mmengine.hooks").Hook
        lr, used = float(need("mmengine.config").Config.fromfile(str(root.parent / "c.py")).optim_wrapper.optimizer.lr), []

        class Model(model_of):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x: Any, mode: str = "loss") -> Any:
                return {"loss": self.layer(x).sum()}

        class Seen(hook_of):  # type: ignore[misc, valid-type]
            def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
                used.append(tuple(float(g["lr"]) for g in runner.optim_wrapper.param_groups))

        data = torch.utils.data.DataLoader([{"x": torch.ones(4)}] * 400, batch_size=2)
        runner = runner_of(
            model=Model(), work_dir=str(root), train_dataloader=data, experiment_name=f"case{resumed}",
            train_cfg={"type": "IterBasedTrainLoop", "max_iters": TOTAL}, log_level="ERROR",
            optim_wrapper={"optimizer": {"type": "SGD", "lr": lr, "momentum": 0.9}}, param_scheduler=sched,
            default_hooks={"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": SAVED_AT}},
            custom_hooks=[Seen()], resume=resumed, load_from=str(root / f"iter_{SAVED_AT}.pth") if resumed else None,
        )  # fmt: skip
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # mmengine 0.10 loads objects, torch 2.6 and later refuse them
        try:
            runner.train()
        finally:
            del os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"]
        return used[-LATER_STEPS:]

    return loop


_MM = {"c.py": "optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.01, momentum=0.9))\n"}
add("mmengine Runner, cosine", _mmengine({"type": "CosineAnnealingLR", "T_max": HORIZON, "by_epoch": False, "end": TOTAL + 30}),
    "python tools/train.py c.py --resume", _MM)  # fmt: skip
add("mmengine Runner, no scheduler", _mmengine(None), "python tools/train.py c.py --resume", _MM)

# --- Lightning's command line (jsonargparse): YAML, with and without a scheduler in it


def _lightning_cli(root: Path, config: Config, resumed: bool) -> Lrs:
    cli, pl = need("lightning.pytorch.cli"), need("lightning.pytorch")
    used: Lrs = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            used.append(tuple(float(g["lr"]) for g in self.optimizers().param_groups))
            return self.layer(batch[0]).sum()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(400, 4)), batch_size=2)

    words = [str(root.parent / w) if w.endswith("yaml") else w for w in config["argv"][2:]]
    plain = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
             "enable_model_summary": False, "max_epochs": -1}  # fmt: skip
    made = cli.LightningCLI(Module, run=False, args=words, trainer_defaults=plain, save_config_callback=None,
                            auto_configure_optimizers=True)  # fmt: skip
    path = root / f"epoch=0-step={SAVED_AT}.ckpt"
    if not resumed:
        made.trainer.fit_loop.epoch_loop.max_steps = SAVED_AT
        made.trainer.fit(made.model)
        made.trainer.save_checkpoint(path)
        used.clear()
        made = cli.LightningCLI(Module, run=False, args=words, trainer_defaults=plain, save_config_callback=None)
    made.trainer.fit_loop.epoch_loop.max_steps = TOTAL
    made.trainer.fit(made.model, ckpt_path=str(path), weights_only=False)
    return used[-LATER_STEPS:]


_OPT = "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 2e-3\n"
_SCHED = "lr_scheduler:\n  class_path: torch.optim.lr_scheduler.ExponentialLR\n  init_args:\n    gamma: 0.9\n"
add("LightningCLI with a scheduler", _lightning_cli, "python main.py --config l.yaml", {"l.yaml": _OPT + _SCHED})
add("LightningCLI without a scheduler", _lightning_cli, "python main.py --config l.yaml", {"l.yaml": _OPT})
add(
    "LightningCLI, overrides",
    _lightning_cli,
    "python main.py --config l.yaml --optimizer.init_args.lr=1e-2",
    {"l.yaml": _OPT},
)

# --- axolotl's schedulers (axolotl/utils/schedulers.py) in transformers' Trainer, which saves them


def _in_hf(make: Callable[[Any, Any], Any], read: Callable[[Path, Config], dict[str, Any]], **more: Any) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        hf, used = need("transformers"), []

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, x: Any, labels: Any = None) -> Any:
                return {"loss": self.layer(x).sum(), "logits": self.layer(x)}

        class Seen(hf.TrainerCallback):  # type: ignore[name-defined,misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **live: Any) -> None:
                used.append(tuple(float(g["lr"]) for g in live["optimizer"].param_groups))

        class Trainer(hf.Trainer):  # type: ignore[name-defined,misc]
            def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
                if self.lr_scheduler is None and (made := make(optimizer or self.optimizer, self.args)) is not None:
                    self.lr_scheduler = made
                return super().create_scheduler(num_training_steps, optimizer)

        settings = {
            "output_dir": str(root), "max_steps": TOTAL, "per_device_train_batch_size": 2, "save_steps": SAVED_AT,
            "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1000, **more,
        } | read(root.parent, config)  # fmt: skip
        settings["use_cpu"] = "deepspeed" not in settings
        (arguments,) = hf.HfArgumentParser(hf.TrainingArguments).parse_dict(settings)
        data = [{"x": torch.ones(4), "labels": torch.zeros(1)}] * 400
        trainer = Trainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Seen()])
        trainer.train(resume_from_checkpoint=str(root / f"checkpoint-{SAVED_AT}") if resumed else None)
        return used[-LATER_STEPS:]

    return loop


def _recipe(root: Path, config: Config) -> dict[str, Any]:
    """axolotl, LLaMA-Factory, TRL: TrainingArguments from a YAML file, with `--name value` or `name=value` over it."""
    omega = need("omegaconf").OmegaConf
    words = config["argv"]
    path = next(word for word in words if word.endswith("yaml"))
    pairs = [w.lstrip("-") for w in words if "=" in w]
    pairs += [
        f"{a.lstrip('-')}={b}"
        for a, b in itertools.pairwise(words)
        if a.startswith("--") and "=" not in a and a != "--config"
    ]
    held = dict(omega.to_container(omega.merge(omega.load(root / path), omega.from_dotlist(pairs))))
    held["learning_rate"] = float(held["learning_rate"])
    if "deepspeed" in held:
        held["deepspeed"] = str(root / held["deepspeed"])
    return held


def _axolotl(name: str, **arguments: Any) -> Callable[[Any, Any], Any]:
    return lambda optimizer, args: getattr(need("axolotl.utils.schedulers"), name)(optimizer, **arguments)


_HF = {"r.yaml": "learning_rate: 2e-4\nwarmup_steps: 5\nlr_scheduler_type: cosine\n"}
_NONE: Callable[[Any, Any], Any] = lambda optimizer, args: None  # noqa: E731
add("LLaMA-Factory's YAML, cosine", _in_hf(_NONE, _recipe), "llamafactory-cli train r.yaml", _HF)
add("LLaMA-Factory's YAML, an override", _in_hf(_NONE, _recipe), "llamafactory-cli train r.yaml learning_rate=1e-3", _HF)
add("TRL's --config, an option", _in_hf(_NONE, _recipe), "trl sft --config r.yaml --learning_rate 1e-3", _HF)
for _name, _arguments in {
    "RexLR": {"max_lr": 2e-4, "min_lr": 2e-5, "total_steps": HORIZON, "num_warmup_steps": 5},
    "get_cosine_schedule_with_min_lr": {"num_warmup_steps": 5, "num_training_steps": HORIZON, "min_lr_ratio": 0.1},
    "get_cosine_schedule_with_quadratic_warmup": {"num_warmup_steps": 5, "num_training_steps": HORIZON},
    "get_cosine_schedule_with_warmup_decay_constant": {
        "num_warmup_steps": 5, "num_training_steps": HORIZON, "constant_lr_ratio": 0.5, "min_lr_ratio": 0.1},
}.items():  # fmt: skip
    add(f"axolotl {_name}", _in_hf(_axolotl(_name, **_arguments), _recipe), "axolotl train r.yaml", _HF)

# --- Composer's Trainer


def _composer(kind: str) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        composer, optim = need("composer"), need("composer.optim")
        made, used = yaml_of(root.parent, config), []

        class Model(need("composer.models").ComposerModel):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def forward(self, batch: Any) -> Any:
                return self.layer(batch[0])

            def loss(self, outputs: Any, batch: Any) -> Any:
                return outputs.sum()

        class Seen(composer.Callback):  # type: ignore[misc, name-defined]
            def batch_start(self, state: Any, logger: Any) -> None:
                used.append(tuple(float(g["lr"]) for g in state.optimizers[0].param_groups))

        model = Model()
        live = optim.DecoupledAdamW(model.parameters(), lr=float(made.optimizer.lr))
        schedule = {
            "cosine": lambda: optim.CosineAnnealingWithWarmupScheduler(t_warmup="5ba", alpha_f=0.1),
            "linear": lambda: optim.LinearScheduler(), "constant": lambda: optim.ConstantScheduler(), "none": lambda: None,
        }[kind]()  # fmt: skip
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(400, 4)), batch_size=2)
        trainer = composer.Trainer(
            model=model, train_dataloader=data, max_duration=f"{TOTAL}ba", optimizers=live, schedulers=schedule, device="cpu",
            save_folder=str(root), save_interval=f"{SAVED_AT}ba", save_filename="ba{batch}-rank{rank}.pt", callbacks=[Seen()],
            save_latest_filename=None, progress_bar=False, load_path=str(root / f"ba{SAVED_AT}-rank0.pt") if resumed else None,
            save_overwrite=True,
        )  # fmt: skip
        trainer.fit()
        trainer.close()
        return used[-LATER_STEPS:]

    return loop


for _kind in ("cosine", "linear", "constant", "none"):
    add(
        f"Composer Trainer, {_kind}",
        _composer(_kind),
        "composer train.py --config m.yaml",
        {"m.yaml": "optimizer:\n  lr: 2e-3\n"},
    )

# --- NeMo's LR policies (nemo/core/optim/lr_scheduler.py), saved by Lightning: loaded without the package around them


def _nemo(name: str, **arguments: Any) -> Loop:
    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        found = importlib.util.find_spec("nemo")
        if found is None:
            need("nemo")
        assert found is not None
        for module in ("nemo.core", "nemo.core.optim"):
            if module not in sys.modules:
                need("nemo")
                sys.modules[module] = types.ModuleType(module)
                sys.modules[module].__path__ = [str(Path(str(found.origin)).parent.joinpath(*module.split(".")[1:]))]
        policies, made = need("nemo.core.optim.lr_scheduler"), yaml_of(root.parent, config)
        model, live = model_and(ADAMW, float(made.model.optim.lr))
        schedule = getattr(policies, name)(live, **arguments)
        path, first, used = root / f"step={SAVED_AT}.ckpt", 0, []
        if resumed:
            state = torch.load(path, weights_only=False)
            live.load_state_dict(state["optimizer_states"][0])
            schedule.load_state_dict(state["lr_schedulers"][0])
            first = state["global_step"]
        for n in range(first, TOTAL):
            used.append(one_step(model, live))
            schedule.step()
            if n + 1 == SAVED_AT and not resumed:
                torch.save({
                    "epoch": 0, "global_step": n + 1, "pytorch-lightning_version": "2.6.6", "state_dict": model.state_dict(),
                    "loops": {}, "optimizer_states": [live.state_dict()], "lr_schedulers": [schedule.state_dict()],
                }, path)  # fmt: skip
        return used[-LATER_STEPS:]

    return loop


for _name, _arguments in {
    "CosineAnnealing": {"max_steps": HORIZON, "warmup_steps": 5, "min_lr": 1e-5, "constant_steps": 0},
    "NoamAnnealing": {"d_model": 64, "max_steps": HORIZON, "warmup_steps": 5, "min_lr": 1e-6},
    "WarmupAnnealing": {"max_steps": HORIZON, "warmup_steps": 5},
    "InverseSquareRootAnnealing": {"max_steps": HORIZON, "warmup_steps": 5},
    "PolynomialDecayAnnealing": {"max_steps": HORIZON, "power": 2.0, "min_lr": 1e-5},
}.items():
    add(
        f"NeMo {_name}",
        _nemo(_name, **_arguments),
        "python train.py --config n.yaml",
        {"n.yaml": "model:\n  optim:\n    lr: 1e-3\n"},
    )

# --- DeepSpeed's "auto": transformers fills the LRs of the DeepSpeed config from its own arguments


def _auto(root: Path, config: Config, resumed: bool) -> Lrs:
    """In a process of its own, with the environment of a launcher: Accelerate's state is one for each process."""
    need("deepspeed")
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
             "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    told = root.parent / "used.json"
    words = [sys.executable, "-m", "benchmarks.authorities.frameworks", str(root), str(int(resumed)), *config["argv"]]
    done = subprocess.run(words, env={**os.environ, **names}, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-600:])
    return [tuple(row) for row in json.loads(told.read_text())]


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


_DS = '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 0}, '
_DS += '"optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": true}}%s}'
_WARM = ', "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", '
_WARM += '"warmup_num_steps": "auto", "total_num_steps": "auto"}}'
_AUTO = {"r.yaml": "learning_rate: 2e-4\ndeepspeed: ds.json\n", "ds.json": _DS % _WARM}
add('DeepSpeed "auto", from a YAML', _auto, "llamafactory-cli train r.yaml", _AUTO)
add('DeepSpeed "auto", from an argument', _auto, "llamafactory-cli train r.yaml learning_rate=1e-3", _AUTO)
add('DeepSpeed "auto", transformers\' scheduler', _auto, "llamafactory-cli train r.yaml",
    {**_AUTO, "ds.json": _DS % ""})  # fmt: skip


if __name__ == "__main__":
    place, again, *typed = sys.argv[1:]
    need("deepspeed").ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is built with a compiler, for inference alone
    found = _in_hf(_NONE, _recipe, warmup_steps=5)(Path(place), {"argv": typed}, again == "1")
    (Path(place).parent / "used.json").write_text(json.dumps(found))
