"""Frameworks by their own code, each with its own way to say the LR: YAML, Hydra, a command line, "auto", an environment.

    python -m benchmarks.authorities configs

A case's launch is recorded as `chronicle run` records it: its command, and the files beside the checkpoints. Its loop
takes the LR from them as the framework does. A refusal is applied as it is printed, to the command and to the files,
with the YAML parser of the framework and not with ours; the 50 LRs must be half the control's then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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

CONFIGS: list[Case] = []
Loop = Callable[[Path, Config, bool], Lrs]


def add(name: str, loop: Loop, argv: str, files: dict[str, str] | None = None, **more: Any) -> None:
    """A case whose launch is this command, with these files beside the checkpoints."""
    CONFIGS.append(Case(name=name, loop=loop, argv=tuple(argv.split()), files=files or {}, config={}, **more))


def after(words: list[str], option: str, default: str = "") -> str:
    """The value of `--option value` or `--option=value` on a command line."""
    for index, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            return words[index + 1]
    return default


def in_loop(lrs: Callable[[Path, Config], Callable[[int], float]]) -> Loop:
    """A script that saves model and optimizer, and sets the LR of each step from what its launch was given."""

    def loop(root: Path, config: Config, resumed: bool) -> Lrs:
        lr_at = lrs(root.parent, config)
        model, live = model_and(ADAMW, lr_at(0))
        first, used, path = 0, [], root / f"step_{SAVED_AT}.pt"
        if resumed:
            state = torch.load(path)
            model.load_state_dict(state["model"])
            live.load_state_dict(state["optimizer"])
            first = state["step"]
        for n in range(first, SAVED_AT + LATER_STEPS):
            for index, group in enumerate(live.param_groups):
                group["lr"] = lr_at(n) / (1 + index)
            used.append(one_step(model, live))
            if n + 1 == SAVED_AT and not resumed:
                torch.save({"model": model.state_dict(), "optimizer": live.state_dict(), "step": n + 1}, path)
        return used[-LATER_STEPS:]

    return loop


def decayed(lr: float, n: int) -> float:
    """A schedule that a script computes itself."""
    return lr * (1 - n / HORIZON)


# --- Hydra (hydra/_internal/config_loader_impl.py): a primary config, its groups, overrides of both


def _hydra(root: Path, config: Config) -> Callable[[int], float]:
    hydra = need("hydra")
    words = config["argv"][2:]
    folder = after(words, "--config-dir", "conf")
    name = after(words, "--config-name", "config")
    overrides = [word for word in words if "=" in word and not word.startswith("--")]
    with hydra.initialize_config_dir(str(root / folder), version_base=None):
        made = hydra.compose(name, overrides)
    return lambda n: decayed(float(made.optimizer.lr), n)


HYDRA = {
    "train.py": 'import hydra\n\n\n@hydra.main(version_base=None, config_path="conf", config_name="config")\n'
    "def main(cfg):\n    lr = cfg.optimizer.lr\n",
    "conf/config.yaml": "defaults:\n  - optimizer: adamw\n  - _self_\n\nsteps: 70\n",
    "conf/optimizer/adamw.yaml": "name: adamw\nlr: 1e-3   # peak\n",
    "conf/optimizer/sgd.yaml": "name: sgd\nlr: 0.004\n",
    "conf/experiment/small.yaml": "# @package _global_\noptimizer:\n  lr: 2e-3\n",
}
add("Hydra override", in_loop(_hydra), "python train.py optimizer.lr=1e-3", HYDRA)
add("Hydra added override", in_loop(_hydra), "python train.py ++optimizer.lr=2e-3", HYDRA)
add("Hydra group by the defaults list", in_loop(_hydra), "python train.py", HYDRA, by_name="where your script sets it")

# --- configs that a command names, and overrides of them


def _omega(root: Path, config: Config) -> Callable[[int], float]:
    omega = need("omegaconf").OmegaConf
    words = config["argv"]
    made = omega.load(root / after(words, "--config"))
    dotted = [word.lstrip("-") for word in words if "=" in word and not word.startswith("--config")]
    made = omega.merge(made, omega.from_dotlist(dotted))
    return lambda n: decayed(float(made.optimizer.lr), n)


def _yacs(root: Path, config: Config) -> Callable[[int], float]:
    """Detectron2 and its kin: `opts` are pairs of a dotted name and a value (yacs `merge_from_list`)."""
    import yaml

    words = config["argv"]
    held = yaml.safe_load((root / after(words, "--config-file")).read_text())["SOLVER"]
    at = words.index("SOLVER.BASE_LR") if "SOLVER.BASE_LR" in words else None
    return lambda n: decayed(float(held["BASE_LR"] if at is None else words[at + 1]), n)


def _toml(root: Path, config: Config) -> Callable[[int], float]:
    import tomllib

    held = tomllib.loads((root / after(config["argv"], "--job.config_file")).read_text())
    return lambda n: decayed(held["optimizer"]["lr"], n)


def _json(root: Path, config: Config) -> Callable[[int], float]:
    import json

    held = json.loads((root / config["argv"][-1]).read_text())
    return lambda n: held["min_lr"] + decayed(held["learning_rate"] - held["min_lr"], n)


def _environment(root: Path, config: Config) -> Callable[[int], float]:
    """`LR=1e-3 python train.py`: the shell sets it; here the words before the command, as `env` takes them."""
    for word in config["argv"]:
        name, equals, value = word.partition("=")
        if equals and name == "LR":
            return lambda n: decayed(float(value), n)
    return lambda n: decayed(float(os.environ.get("LR", 1e-3)), n)


def _shell(root: Path, config: Config) -> Callable[[int], float]:
    """A shell script that holds the command: the arguments of its `python` line."""
    import re
    import shlex

    text = (root / config["argv"][-1]).read_text()
    variables = dict(re.findall(r"^(?:export )?([A-Z_]+)=(\S+)$", text, re.MULTILINE))
    line = next(shlex.split(row) for row in text.replace("\\\n", " ").splitlines() if row.startswith("python"))
    value = after(line, "--lr")
    return lambda n: decayed(float(variables.get(value.strip("${}"), value)), n)


def _given(root: Path, config: Config) -> Callable[[int], float]:
    """A command line in the words of one's own: the first LR in it."""
    import json

    words = config["argv"]
    value = after(words, "--override").rpartition("=")[2] or after(words, "--learning-rate")
    if after(words, "--optimizer"):
        value = json.loads(after(words, "--optimizer"))["lr"]
    return lambda n: decayed(float(value), n)


YAML = {"train.yaml": "# recipe\noptimizer:\n  lr: 1e-3   # peak\n  eps: 1e-8\n", "train.py": "import omegaconf\n"}
add("OmegaConf YAML", in_loop(_omega), "torchrun train.py --config train.yaml", YAML)
add("OmegaConf dotted override", in_loop(_omega), "torchrun train.py --config train.yaml optimizer.lr=2e-3", YAML)
add("OmegaConf dotted option", in_loop(_omega), "torchrun train.py --config=train.yaml --optimizer.lr=2e-3", YAML)
DETECTRON = {"c.yaml": "SOLVER:\n  BASE_LR: 0.02\n  STEPS: (30, 50)\n"}
add("Detectron2 config file", in_loop(_yacs), "python train_net.py --config-file c.yaml", DETECTRON)
add("Detectron2 opts", in_loop(_yacs), "python train_net.py --config-file c.yaml SOLVER.BASE_LR 0.0025", DETECTRON)
add("TOML of a command", in_loop(_toml), "torchrun train.py --job.config_file t.toml", {"t.toml": "[optimizer]\nlr = 3e-4\n"})
add("JSON of a command", in_loop(_json), "deepspeed train.py args.json", {
    "args.json": '{"learning_rate": 5e-5, "min_lr": 5e-6, "warmup_steps": 10}'})  # fmt: skip
add("environment on the command", in_loop(_environment), "env LR=2e-3 python train.py", {
    "train.py": 'import os\nlr = float(os.environ["LR"])\n'})  # fmt: skip
add("environment with a default in code", in_loop(_environment), "python train.py", {
    "train.py": 'import os\nlr = float(os.environ.get("LR", "1e-3"))\n'}, by_name="`LR`")  # fmt: skip
add("a shell script's argument", in_loop(_shell), "bash run.sh", {
    "run.sh": "#!/bin/bash\npython train.py --model 7b \\\n  --lr 1e-3 --steps 70\n"})  # fmt: skip
add("a shell script's variable", in_loop(_shell), "bash run.sh", {
    "run.sh": "#!/bin/bash\nexport LR=1e-3\npython train.py --lr $LR\n"})  # fmt: skip
add("an override inside an option", in_loop(_given), "python train.py --override=optimizer.lr=1e-3")
add("JSON inside an option", in_loop(_given), """python train.py --optimizer {"type":"adamw","lr":1e-3}""")
add("an option with dashes", in_loop(_given), "python train.py --learning-rate 1e-3")
