"""Causes on HF Trainer, Lightning, a plain torch loop and a raw DeepSpeed engine."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.planted_bugs.causes_accelerate import reseal
from benchmarks.planted_bugs.plan import Acts, Plan, cause

HF, PL, PT, DS = "transformers", "lightning", "torch", "deepspeed"


def _gone(name: str) -> Any:
    """A hook: the file was never there, and the manifest does not miss it."""

    def remove(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        reseal(checkpoint)

    return remove


for name, source in (
    ("scheduler.pt", "transformers 5.23, silent; #25865"),
    ("optimizer.pt", "transformers 5.23, silent"),
    ("rng_state.pth", "transformers, silent"),
):

    @cause(HF, f"{name} missing", source)
    def _(plan: Plan, name: str = name) -> None:
        plan.files.append(_gone(name))


@cause(HF, "scheduler.pt renamed to .bak", "seed exp9")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c / "scheduler.pt").rename(c / "scheduler.pt.bak"))


@cause(HF, "resume flag forgotten", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(HF, "warm-up of another length", "transformers #24656")
def _(plan: Plan) -> None:
    plan.again["warmup_steps"] = 20


@cause(HF, "max_steps changed: another horizon", "transformers #27749", acts=Acts.ALLOWED)
def _(plan: Plan) -> None:
    plan.again["max_steps"] = 200


@cause(HF, "scheduler type changed", "formats §4 row 21")
def _(plan: Plan) -> None:
    plan.again["lr_scheduler_type"] = "cosine"


@cause(HF, "accumulation doubled", "transformers #5605")
def _(plan: Plan) -> None:
    plan.again["gradient_accumulation_steps"] = 2


@cause(HF, "data starts again: ignore_data_skip", "accelerate #2016")
def _(plan: Plan) -> None:
    plan.again["ignore_data_skip"] = True


@cause(HF, "moments emptied in optimizer.pt", "KempnerForge #115")
def _(plan: Plan) -> None:
    def empty(checkpoint: Path) -> None:
        state = torch.load(checkpoint / "optimizer.pt", weights_only=False)
        torch.save({**state, "state": {}}, checkpoint / "optimizer.pt")
        reseal(checkpoint)

    plan.files.append(empty)


@cause(HF, "LR set again when training begins", "transformers #23099")
def _(plan: Plan) -> None:
    def reset(parts: Any) -> None:
        parts["optimizer"].param_groups[0]["lr"] = 1e-2

    plan.after_load.append(reset)


def in_ckpt(change: Any) -> Any:
    def edit(path: Path) -> None:
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)
        reseal(path)

    return edit


@cause(PL, "no scheduler in the file", "Lightning #11188")
def _(plan: Plan) -> None:
    plan.files.append(in_ckpt(lambda s: s.update(lr_schedulers=[])))


@cause(PL, "optimizer state empty in the file", "KempnerForge #115")
def _(plan: Plan) -> None:
    plan.files.append(in_ckpt(lambda s: s["optimizer_states"][0].update(state={})))


@cause(PL, "scheduler saved before its update: off by one", "Lightning #1772")
def _(plan: Plan) -> None:
    def earlier(state: Any) -> None:
        state["lr_schedulers"][0]["last_epoch"] -= 1

    plan.files.append(in_ckpt(earlier))


@cause(PL, "step counter of the loops lost", "Lightning #12274")
def _(plan: Plan) -> None:
    def lose(state: Any) -> None:
        progress = state["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
        progress["optimizer"]["step"]["total"] = {"ready": 0, "completed": 0}

    plan.files.append(in_ckpt(lose))


@cause(PL, "fit without ckpt_path", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(PL, "schedule of another shape", "OneTrainer #1604")
def _(plan: Plan) -> None:
    plan.again["scheduler"] = "CosineAnnealingLR"


@cause(PL, "weights changed after the load", "schnetpack PR #785")
def _(plan: Plan) -> None:
    def change(trainer: Any) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.parameters()).mul_(1.01)

    plan.after_load.append(change)


@cause(PL, "accumulation doubled", "transformers #5605")
def _(plan: Plan) -> None:
    plan.again["accumulation"] = 2


for part, source in (("model", "M1"), ("optimizer", "composer PR #1376"), ("scheduler", "NeMo Automodel #763")):

    @cause(PT, f"{part} not loaded", source)
    def _(plan: Plan, part: str = part) -> None:
        plan.again["leave_out"] = [part]


@cause(PT, "the script's own step counter lost: data starts again", "Lightning #12274")
def _(plan: Plan) -> None:
    plan.again["leave_out"] = ["step"]


@cause(PT, "resume flag forgotten", "verl #7952")
def _(plan: Plan) -> None:
    plan.again["load"] = False


@cause(PT, "average loaded as weights", "schnetpack PR #785")
def _(plan: Plan) -> None:
    plan.first["ema"] = True
    plan.after_load.append(lambda loop: loop.model.load_state_dict(loop.average.state_dict()))


@cause(PT, "average not restored", "schnetpack PR #785")
def _(plan: Plan) -> None:
    plan.first["ema"] = True
    plan.again["leave_out"] = ["average"]


@cause(PT, "loss scaler not restored", "metaseq #3")
def _(plan: Plan) -> None:
    plan.first["scaler"] = True
    plan.again["leave_out"] = ["scaler"]


@cause(PT, "scheduler built after the load", "pytorch #65342")
def _(plan: Plan) -> None:
    def rebuild(loop: Any) -> None:
        loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 5, 0.7)
        for group in loop.optimizer.param_groups:
            group["lr"] = group["initial_lr"]

    plan.after_load.append(rebuild)


@cause(PT, "scheduler stepped twice on load", "slime PR #1547")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda loop: loop.scheduler.step())


@cause(PT, "position of the schedule shifted (cosine)", "pytorch #60265")
def _(plan: Plan) -> None:
    plan.first["scheduler"] = "CosineAnnealingLR"
    plan.after_load.append(lambda loop: setattr(loop.scheduler, "last_epoch", 3))


@cause(PT, "samples begin elsewhere", "webdataset #234")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda loop: setattr(loop, "first_sample", 500))


@cause(PT, "data starts again", "RLinf PR #1469")
def _(plan: Plan) -> None:
    plan.after_load.append(lambda loop: setattr(loop, "first_sample", -12))


@cause(PT, "LR halved in the script, the file wins", "formats §3: no effect in 24 of 26", acts=Acts.NEVER_SEEN)
def _(plan: Plan) -> None:
    plan.again["wished_lr"] = 5e-3  # the script's wish never reaches memory: state is exactly what was saved


@cause(DS, "`latest` missing", "DeepSpeed load_checkpoint: (None, None)")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c.parent / "latest").unlink())


@cause(DS, "`latest` names a tag that is not there", "DeepSpeed 0.19.8")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c.parent / "latest").write_text("global_step99"))


@cause(DS, "`latest` empty", "DeepSpeed 0.19.8: truncate and write")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: (c.parent / "latest").write_text(""))


for option, source in (
    ("load_lr_scheduler_states", "verl #7953"),
    ("load_optimizer_states", "formats §4 row 16"),
):

    @cause(DS, f"{option}=False", source)
    def _(plan: Plan, option: str = option) -> None:
        plan.again["load_options"] = {option: False}


@cause(DS, "load_module_only=True", "DeepSpeed PR #762")
def _(plan: Plan) -> None:
    plan.again["load_options"] = {"load_module_only": True}


@cause(DS, "engine built without its scheduler", "formats §4 row 17")
def _(plan: Plan) -> None:
    plan.again["scheduler"] = None


@cause(DS, "ZeRO shard missing", "DeepSpeed 0.19.8 `latest` before the barrier")
def _(plan: Plan) -> None:
    plan.files.append(lambda c: next(c.glob("*_optim_states.pt")).unlink())


@cause(DS, "scheduler class changed", "formats §4 row 18")
def _(plan: Plan) -> None:
    plan.again["scheduler"] = "CosineAnnealingLR"
