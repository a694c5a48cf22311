"""Fourth list of causes, frozen on 2026-11-23 before the guard was tried on them, by somebody who had read the first three.

None stands in `causes.py`, `fresh.py`, `third.py`, `planted_bugs` or `benchmarks/envelope`. More than half are of kinds that no
list had: what a loop does between backward and step, what it does after the step, code that changed under an equal name,
averages that follow something else, trainers' own rules of the loss, and changes in the middle of a launch by way of the
trainer. Every cause that a script could also mean has its twin, in which both launches do it.
Some plays were planted wrongly and put right after the first run: a hook that returned something, rows "grouped by length",
which have none there, twins that drew noise for the batches they skipped or skipped by a wrong count, and a twin of DeepSpeed
that broke what its own configuration promises.
`python -m benchmarks.strange_causes --fourth` plays them, with `--promise` every script promises the next batch.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.strange_causes.causes import Cause
from benchmarks.strange_causes.fresh import BASE, bare, inner
from benchmarks.strange_causes.scripts import SAVED_AT
from benchmarks.strange_causes.third import edit

__all__ = ["FOURTH", "FOURTH_HEALTHY"]

T, A, H, L, F, D = "torch", "accelerate", "transformers", "lightning", "fabric", "deepspeed"
FOURTH: list[Cause] = []
FOURTH_HEALTHY: list[Cause] = []


def add(forms: Sequence[str], family: str, name: str, again: dict[str, Any] | None = None, **rest: Any) -> None:
    """One cause in every form. `twin=True`: also a healthy twin, whose launches both have what the cause changes."""
    both, twin = rest.pop("both", {}), rest.pop("twin", False)
    into = FOURTH_HEALTHY if rest.get("healthy") else FOURTH
    for form in forms:
        own = {**BASE[form], **both}
        into.append(Cause(form=form, family=family, name=name, both=own, again=again or {}, **rest))
        if twin:
            late = {"at_step": rest["at_step"], "in_both": True} if "at_step" in rest else {}
            alike = {"form": form, "family": "healthy", "name": f"in both launches: {name}", "healthy": True}
            FOURTH_HEALTHY.append(Cause(**alike, both={**own, **(again or {})}, **late))


# ---- between backward and step, and after it -------------------------------------------------------------------------


def _callback(factor: float) -> Callable[[], Any]:
    def make() -> Any:
        from transformers import TrainerCallback

        class Scales(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
                for p in parts["model"].parameters():
                    if p.grad is not None:
                        p.grad.mul_(factor)

        return Scales()

    return make


add((T, F), "loop", "the optimizer steps twice a batch", {"num_steps": 2}, twin=True)
add((T, A), "loop", "gradients are zeroed before the step", {"zero_early": True})
add((T, F), "loop", "backward is called twice", {"backwards": 2}, both={"clip": None}, twin=True)
add((L, D), "loop", "the loss is detached: no gradient flows", {"detached": True})
add((T, A), "loop", "gradients are scaled by hand after the clipping", {"hand_scale": 0.3}, twin=True)
add((H,), "loop", "a callback of the script scales the gradients", {"callbacks": (_callback(0.3),)}, twin=True)
add((T, F), "loop", "one part is clipped a second time", {"clip_part": "blocks.1"}, twin=True)
add((T, A), "loop", "weights decay by hand after the step as well", {"hand_decay": 0.02}, twin=True)
add((L,), "loop", "every second batch is skipped", {"odd_skipped": True}, twin=True)
add((A,), "loop", "accumulate() is forgotten", {"accumulate": False}, both={"accumulation": 2})
add((A,), "healthy", "accumulate() is never used", both={"accumulation": 2, "accumulate": False, "per_step": 1}, healthy=True)

# ---- the loss --------------------------------------------------------------------------------------------------------


def _rolled(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return labels.roll(1, dims=0)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_tanh_gelu.__module__, _tanh_gelu.__qualname__, _tanh_gelu.__name__ = (
    getattr(functional.gelu, "__module__", None) or "torch._C._nn", functional.gelu.__qualname__, functional.gelu.__name__,
)  # fmt: skip


def _mean_of_means() -> Any:
    import transformers

    class Unaware(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    return Unaware


def _count_on(script: Any) -> None:
    script.calls = 12 if hasattr(script, "trainer") else script.steps


ANNEALED = {"anneal": True, "auxiliary": 0.5}
add((T, A, L), "loss", "labels of the row before", {"labels": _rolled}, twin=True)
add((T, F), "loss", "logits are rounded to bfloat16 before the loss", {"half_logits": True}, twin=True)
add((T,), "loss", "the anneal of an auxiliary loss begins again", both=ANNEALED)
add((L,), "loss", "the anneal of an auxiliary loss begins again", both=ANNEALED)
add((T, L), "healthy", "an annealed auxiliary loss goes on", both=ANNEALED, after=[_count_on], healthy=True)
add((T, A), "model", "gelu by its tanh formula, under the same name", {"act": _tanh_gelu}, twin=True)
add((H,), "loss", "mean of means over the micro-batches", {"model_kind": _mean_of_means}, both={"accumulation": 2}, twin=True)


def _recompute(script: Any, *, preserve: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in inner(script).blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=preserve)


def _halve(script: Any) -> None:
    def halve(p: Any) -> None:
        p.grad.mul_(0.5)

    for p in inner(script).blocks[1].parameters():
        p.register_post_accumulate_grad_hook(halve)


def _halve_early(script: Any) -> None:
    for p in inner(script).blocks[1].parameters():
        p.register_hook(lambda gradient: gradient * 0.5)


DROPS = {"dropout": 0.3}
add((T,), "model", "recomputed blocks draw other dropout masks", both=DROPS, after=[partial(_recompute, preserve=False)])
add((T,), "healthy", "blocks are recomputed from now on", both=DROPS, after=[partial(_recompute, preserve=True)], healthy=True)
add((F,), "gradients", "a hook after the accumulation halves those of one block", after=[_halve])
add((D,), "gradients", "a hook halves those of one block", after=[_halve_early])

# ---- data ------------------------------------------------------------------------------------------------------------

add((T, F), "data", "rows are overwritten in memory as they are read", {"spoil": True})
add((T,), "data", "numpy's generator is not restored", {"numpy_rng": False}, both={"numpy_noise": 0.1})
add((T,), "healthy", "numpy's generator is restored", both={"numpy_noise": 0.1}, healthy=True)
add((H,), "data", "rows in their order, no longer shuffled", {
    "arguments": {"train_sampling_strategy": "sequential"}}, twin=True)  # fmt: skip
add((L,), "data", "half of the batches of an epoch", {"trainer": {"limit_train_batches": 0.5}})
add((A,), "data", "the seedable sampler is switched off", {"seedable": False})
add((H,), "data", "positions begin at 3", {"positions": 3}, both={"positions": 0}, twin=True)
add((H,), "data", "a larger share of the tokens is masked", {"numpy_noise": 0.4}, both={"numpy_noise": 0.1}, twin=True)

# ---- checkpoints, averages, schedules ----------------------------------------------------------------------------------


def _transpose(state: Any) -> None:
    state["model"]["mlp.1.weight"] = state["model"]["mlp.1.weight"].T.contiguous()


def _later_head(path: Path) -> None:
    edit(path, lambda state: state["model"]["head.weight"].add_(3e-3 * torch.randn_like(state["model"]["head.weight"]).sign()))


def _follow_copy(script: Any) -> None:
    script.followed = copy.deepcopy(script.model)


add((T, F), "checkpoint", "a square matrix is transposed in the file", files=lambda path: edit(path, _transpose))
add((T,), "checkpoint", "one tensor of the file is of a step nearby", files=_later_head)
add((T,), "average", "follows at every fourth step only", {"ema_every": 4}, both={"ema": True}, twin=True)
add((T,), "average", "follows a copy that does not train", both={"ema": True}, after=[_follow_copy])
add((D,), "optimizer", "load_optimizer_states=False", {"load_options": {"load_optimizer_states": False}})
add((D,), "scheduler", "load_lr_scheduler_states=False", {"load_options": {"load_lr_scheduler_states": False}})
add((D,), "scheduler", "stepped by the script beside the engine", {"steps_of_scheduler": 2}, twin=True)
add((A,), "scheduler", "stepped at every micro-batch", {"trainer": {"step_scheduler_with_optimizer": False}}, both={
    "accumulation": 2}, twin=True)  # fmt: skip

# ---- in the middle of a launch -----------------------------------------------------------------------------------------


def _four_micro_batches(script: Any) -> None:
    if hasattr(script, "trainer"):
        script.trainer.accumulate_grad_batches = 4
    else:
        script.accelerator.gradient_accumulation_steps = 4


def _clip_no_more(script: Any) -> None:
    if hasattr(script, "trainer"):
        script.trainer.args.max_grad_norm = 0.0
    else:
        script.model.optimizer.clip_grad = 0.0


def _average_stays(script: Any) -> None:
    script.model.load_state_dict(script.ema.module.state_dict())


def _prune(script: Any) -> None:
    with torch.no_grad():
        for layer in inner(script).mlp:
            layer.weight[layer.weight.abs() < layer.weight.abs().median()] = 0


def _one_group_rests(script: Any) -> None:
    scheduler = getattr(script.scheduler, "scheduler", script.scheduler)
    scheduler.base_lrs[1] = 0.0
    for optimizer in (bare(script), scheduler.optimizer):
        optimizer.param_groups[1]["lr"] = 0.0


def _cut_off(script: Any) -> None:
    inner(script).mlp[0].register_forward_hook(lambda module, args, out: out.detach())


def _option(script: Any, **options: Any) -> None:
    script.o.update(options)


add((A, L), "later", "four micro-batches a step from the third step on", at_step=_four_micro_batches, twin=True)
CLIPS = {"arguments": {"max_grad_norm": 0.3}}
add((H,), "later", "clipping ends at the third step", both=CLIPS, at_step=_clip_no_more, twin=True)
add((D,), "later", "clipping ends at the third step", at_step=_clip_no_more)
add((T,), "later", "the average stays in the model after the third step", both={"ema": True}, at_step=_average_stays, twin=True)
add((F,), "later", "half of two layers is pruned at the third step", at_step=_prune, twin=True)
add((T, D), "later", "one group has no LR from the third step on", at_step=_one_group_rests)
add((D,), "later", "one layer gets no gradient from the third step on", at_step=_cut_off, twin=True)
add((T,), "later", "NaN losses are hidden by nan_to_num from the third step on", at_step=partial(_option, hide_nan=True))
add((T, F), "later", "torch is seeded again before every batch, from the third step on", both={"dropout": 0.2}, at_step=partial(
    _option, seed_each=True))  # fmt: skip


def _patience(name: str) -> Callable[[], Any]:
    def make() -> Any:
        from lightning.pytorch.callbacks import EarlyStopping

        return type(name, (EarlyStopping,), {"__qualname__": name})(monitor="loss", patience=50, check_on_train_epoch_end=False)

    return make


STOPS = {"logged": True, "callbacks": (_patience("Stops"),)}
RENAMED = {"callbacks": (_patience("StopsToo"),)}
add((L,), "state", "early stopping forgets its count: its class has another name", RENAMED, both=STOPS)
add((L,), "healthy", "early stopping", both=STOPS, healthy=True)

assert SAVED_AT == 18
