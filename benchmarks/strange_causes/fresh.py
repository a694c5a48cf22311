"""Second list of causes, written on 2026-11-22 at night against a frozen tree, by an adversary who had seen the first list.

None of them stands in `causes.py`, `planted_bugs` or `benchmarks/envelope`. They were played once before anything was changed
for them: `docs/guard.md` has that rate. Two forms are new: Lightning Fabric and a DeepSpeed engine.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.strange_causes.causes import Cause, _change_state, _groups, _params
from benchmarks.strange_causes.scripts import VOCABULARY

__all__ = ["FRESH", "FRESH_HEALTHY"]

T, A, H, L, F, D = "torch", "accelerate", "transformers", "lightning", "fabric", "deepspeed"
BASE: dict[str, dict[str, Any]] = {T: {}, A: {}, H: {}, L: {"shuffle": False}, F: {}, D: {}}
FRESH: list[Cause] = []
FRESH_HEALTHY: list[Cause] = []


def add(forms: Sequence[str], family: str, name: str, again: Mapping[str, Any] | None = None, **rest: Any) -> None:
    """One cause in every form."""
    both = rest.pop("both", {})
    into = FRESH_HEALTHY if rest.get("healthy") else FRESH
    into.extend(
        Cause(form=form, family=family, name=name, both={**BASE[form], **both}, again=again or {}, **rest) for form in forms
    )


def inner(script: Any) -> Any:
    """The model without the wrappers of its framework."""
    model = script.model
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def bare(script: Any) -> Any:
    """The optimizer without the wrapper of its framework."""
    return getattr(script.optimizer, "optimizer", script.optimizer)


# ---- what is trained -------------------------------------------------------------------------------------------------


def _exchange(script: Any) -> None:
    one, two = (layer.weight for layer in inner(script).mlp)
    with torch.no_grad():
        kept = one.clone()
        one.copy_(two), two.copy_(kept)


def _hook_output(script: Any, part: str, work: Any) -> None:
    inner(script).get_submodule(part).register_forward_hook(lambda module, args, out: work(out))


add((T, F, D), "model", "the embedding is detached by a hook", after=[
    partial(_hook_output, part="embedding", work=lambda out: out.detach().requires_grad_())])  # fmt: skip
add((T, A), "model", "the output of one block is halved by a hook", after=[
    partial(_hook_output, part="blocks.1", work=lambda out: 0.5 * out)])  # fmt: skip
add((T, F), "model", "dropout in a hook, which no module shows", after=[
    partial(_hook_output, part="norms.0", work=lambda out: functional.dropout(out, 0.3))])  # fmt: skip
add((T, A, L, F), "model", "two layers of one shape exchanged", after=[_exchange])
add((T,), "model", "padding_idx of the embedding", after=[lambda s: setattr(inner(s).embedding, "padding_idx", 0)])
add((F, D), "model", "dropout", {"dropout": 0.2})
add((F, D), "model", "another base of the rotary positions", {"theta": 500_000.0})
add((H,), "model", "tie_word_embeddings of the configuration", {"config": {"tie_word_embeddings": True}})
add((H,), "model", "rotary positions scaled by the configuration", {
    "config": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}})  # fmt: skip

# ---- the loss --------------------------------------------------------------------------------------------------------


def _second_half(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(ids.shape[1]) < ids.shape[1] // 2, -100, labels)


def _tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return functional.cross_entropy(flat, target, reduction="none").view(len(labels), -1)


def _per_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (_tokens(logits, labels).sum(1) / (labels[:, 1:] >= 0).sum(1).clamp(min=1)).mean()


def _focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = _tokens(logits, labels)
    return ((1 - torch.exp(-each)) ** 2 * each).sum() / (labels[:, 1:] >= 0).sum()


def _small(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.02 * _tokens(logits, labels).sum() / (labels[:, 1:] >= 0).sum()


def _teacher(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(flat, target) + 0.5 * (logits - 0.1).square().mean()


def _tripled() -> Any:
    import transformers

    class Tripled(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return (found[0] * 3, *found[1:]) if isinstance(found, tuple) else found * 3

    return Tripled


def _unmasked() -> Any:
    import transformers

    class Unmasked(transformers.Trainer):  # type: ignore[misc]
        def _prepare_inputs(self, inputs: Any) -> Any:
            return {k: v for k, v in super()._prepare_inputs(inputs).items() if k != "attention_mask"}

    return Unmasked


add((T, A, F, D), "loss", "the first half of every row is masked", {"labels": _second_half})
add((T, L, F, D), "loss", "mean of rows instead of tokens", {"loss": _per_row})
add((T, A), "loss", "a focal factor", {"loss": _focal})
add((F, D), "loss", "a fiftieth of the loss", {"loss": _small})
add((L,), "loss", "a teacher is mixed in", {"loss": _teacher})
add((H,), "loss", "three times the loss, by a Trainer of the script's own", {"model_kind": _tripled}, both={
    "arguments": {"max_grad_norm": 0.0}})  # fmt: skip
add((F, D), "loss", "label smoothing", {"smoothing": 0.2})

# ---- data ------------------------------------------------------------------------------------------------------------


def _with_replacement(rows: Any) -> Any:
    return torch.utils.data.RandomSampler(rows, replacement=True, generator=torch.Generator().manual_seed(5))


def _one_ahead(script: Any) -> None:
    script.steps += 1


def _all_equal(script: Any) -> None:
    script.rows_of_data.rows[:] = script.rows_of_data.rows[0]


add((T, A, F), "data", "a sampler with replacement", {"sampler": _with_replacement})
add((T, A, F), "data", "the loop's counter is one ahead", after=[_one_ahead])
add((A,), "data", "set_epoch is forgotten", after=[lambda s: setattr(s.loader, "set_epoch", lambda epoch: None)])
add((H, F, D), "data", "one token in ten is unknown", {"noise": 0.1})
add((H,), "data", "the attention mask is dropped", {"model_kind": _unmasked})
add((F, D), "data", "padding on the other side", {"side": "left"})
add((F, D), "data", "another seed of the order", {"seed": 5})

# ---- batch -----------------------------------------------------------------------------------------------------------

add((A, H, L, D, F), "batch", "twice the accumulation", {"accumulation": 2})
add((F, D), "batch", "half the micro-batch", {"batch": 4})

# ---- optimizer -------------------------------------------------------------------------------------------------------


def _exchange_moments(script: Any) -> None:
    wanted = {id(layer.weight) for layer in inner(script).mlp}
    found = [state for param, state in _params(script) if id(param) in wanted]
    found[0]["exp_avg"], found[1]["exp_avg"] = found[1]["exp_avg"], found[0]["exp_avg"]


def _shrink_in_step(script: Any) -> None:
    def shrink(optimizer: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(0.97)

    bare(script).register_step_pre_hook(shrink)


def _second_group(script: Any) -> None:
    bare(script).param_groups[1]["lr"] = 1e-3


def _double_base(script: Any) -> None:
    scheduler = getattr(script.scheduler, "scheduler", script.scheduler)
    scheduler.base_lrs = [2 * lr for lr in scheduler.base_lrs]


def _other_lambda(script: Any) -> None:
    scheduler = getattr(script.scheduler, "scheduler", script.scheduler)
    scheduler.lr_lambdas = [lambda step: 0.3 for _ in scheduler.lr_lambdas]


def _ahead(script: Any) -> None:
    scheduler = getattr(script.scheduler, "scheduler", script.scheduler)
    scheduler.last_epoch += 3


add((T, A, F), "optimizer", "first moments of two tensors exchanged", after=[_exchange_moments])
add(
    (T, L),
    "optimizer",
    "first moments with the other sign",
    after=[partial(_change_state, key="exp_avg", work=lambda t: -t)],
)
add((A, F), "optimizer", "LR of the second group", after=[_second_group])
add((T,), "optimizer", "AMSGrad on", after=[partial(_groups, amsgrad=True)])
add((H,), "optimizer", "Adafactor", {"arguments": {"optim": "adafactor"}})
add((T, A), "optimizer", "weights shrink inside every step, by a hook", after=[_shrink_in_step])
add((D,), "optimizer", "clipping of the configuration", {"clip": 0.01})
add((L,), "optimizer", "clipping by value", {"trainer": {"gradient_clip_algorithm": "value"}})
add((F, D), "optimizer", "betas of the arguments", after=[partial(_groups, betas=(0.8, 0.95))])

# ---- scheduler -------------------------------------------------------------------------------------------------------

add((T, F, L), "scheduler", "base LRs doubled", after=[_double_base])
add((T, A, F, L), "scheduler", "another function", after=[_other_lambda])
add((T, A, L), "scheduler", "three steps ahead", after=[_ahead])
add((F,), "scheduler", "left out of the load", {"parts": ("model", "optimizer", "step")})
add((H,), "scheduler", "constant after the warm-up", {"arguments": {"lr_scheduler_type": "constant_with_warmup"}})

# ---- precision, averages, generators, checkpoints ------------------------------------------------------------------------


def _half(script: Any) -> None:
    script.model.to(torch.bfloat16)


def _moments_halved(path: Path) -> None:
    state = torch.load(path, weights_only=False)
    for one in state["optimizer"]["state"].values():
        one["exp_avg"] = one["exp_avg"] / 2
    torch.save(state, path)


def _step_less(path: Path) -> None:
    state = torch.load(path, weights_only=False)
    state["step"] -= 1
    torch.save(state, path)


add((H,), "precision", "bf16 of the arguments", {"arguments": {"bf16": True}})
add((L,), "precision", "mixed precision", {"trainer": {"precision": "bf16-mixed"}})
add((T,), "precision", "the model in bfloat16", after=[_half])
add((T,), "average", "the average's count begins again", both={"ema": True}, after=[lambda s: s.ema.n_averaged.zero_()])
add((T, A), "generators", "the first seed again after the load, with dropout", both={"dropout": 0.2}, after=[
    lambda s: torch.manual_seed(0)])  # fmt: skip
add((T, F), "checkpoint", "first moments halved in the file", files=_moments_halved)
add((T, F), "checkpoint", "its own step is one less", files=_step_less)

# ---- gradients -------------------------------------------------------------------------------------------------------


def _scale_one(script: Any, factor: float) -> None:
    inner(script).mlp[0].weight.register_hook(lambda gradient: gradient * factor)


add((T, A, F, D), "gradients", "a hook shrinks that of one layer to a tenth", after=[partial(_scale_one, factor=0.1)])
add((T, A, L), "gradients", "a hook makes that of one layer zero", after=[partial(_scale_one, factor=0.0)])

# ---- acting later ----------------------------------------------------------------------------------------------------


def _reset_layer(script: Any) -> None:
    torch.nn.init.normal_(inner(script).mlp[0].weight, std=0.5)


def _dropout(script: Any) -> None:
    for block in inner(script).blocks:
        block.dropout.p = 0.5


def _set_option(script: Any, **options: Any) -> None:
    script.o.update(options)


def _freeze(script: Any) -> None:
    inner(script).mlp[0].weight.requires_grad_(False)


add((T, A, F), "later", "a layer is frozen at the third step", at_step=_freeze)
add((T, F, D), "later", "dropout becomes 0.5 at the third step", at_step=_dropout)
add((T, A), "later", "a layer is drawn anew at the third step", at_step=_reset_layer)
add((T, A, F), "later", "all labels are masked from the third step on", at_step=partial(
    _set_option, labels=lambda ids, labels: torch.full_like(labels, -100)))  # fmt: skip
add((T, A), "later", "betas change at the third step", at_step=partial(_groups, betas=(0.5, 0.9)))
add((T, F), "later", "every row is the same from the third step on", at_step=_all_equal)
add((T, A), "later", "clipping ends at the third step", at_step=partial(_set_option, clip=None))
add(
    (T,),
    "later",
    "gradients are never zeroed again from the third step on",
    at_step=partial(_set_option, zero_grad=False),
)
add((T, H), "later", "second moments are wiped at the third step", at_step=partial(
    _change_state, key="exp_avg_sq", work=lambda t: t * 0))  # fmt: skip
add((T,), "later", "autocast begins at the third step", at_step=partial(_set_option, autocast=True))

# ---- healthy ---------------------------------------------------------------------------------------------------------


def _same_seed(script: Any) -> None:
    torch.manual_seed(4)


add((F, D), "healthy", "nothing changes", healthy=True)
add((F, D), "healthy", "dropout", both={"dropout": 0.2}, healthy=True)
add((F, D), "healthy", "accumulation", both={"accumulation": 2}, healthy=True)
add((F,), "healthy", "no clipping", both={"clip": None}, healthy=True)
add((T, F), "healthy", "a hook on a gradient in both launches", both={"hook": 0.1}, healthy=True)
add((T,), "healthy", "a sampler with replacement in both launches", both={"sampler": _with_replacement}, healthy=True)
add((T, A, F), "healthy", "cosine", both={"scheduler": "cosine"}, healthy=True)
add((H,), "healthy", "label smoothing, in both launches", both={
    "arguments": {"label_smoothing_factor": 0.1}}, healthy=True)  # fmt: skip
add((H,), "healthy", "Trainer of the script's own", both={"model_kind": _tripled}, healthy=True)
add((T,), "healthy", "masked first half, in both launches", both={"labels": _second_half}, healthy=True)

assert VOCABULARY > 4
