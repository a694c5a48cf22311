"""Fifth list of causes, frozen on 2026-11-23 before the guard was tried on them, by somebody who had read the first four.

None of the four lists, `planted_bugs` or `benchmarks/envelope` has one of these. They are accidents of a resume as reports
tell them, over six frameworks: configuration, layers wrapped or replaced after the load, masks, loss and its factors, data and
tokenizer, groups of the optimizer, rates, precision, averages, files, and a few in the middle of a launch.
`python -m benchmarks.strange_causes --fifth` plays them; `--promise`: every script promises the next batch, which is what
outcome 5 of the guard asks for before other data are refused. Five causes were planted wrongly and put right after the first
run: two hooks that returned something, moments of tensors that have none, a setting that this model does not read, and a
factor that clipping takes away.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils import parametrize

from benchmarks.strange_causes.causes import Cause, _groups, _params
from benchmarks.strange_causes.fresh import BASE, _tokens, bare, inner
from benchmarks.strange_causes.scripts import PAD
from benchmarks.strange_causes.third import edit

__all__ = ["FIFTH", "FIFTH_HEALTHY"]

T, A, H, L, F, D = "torch", "accelerate", "transformers", "lightning", "fabric", "deepspeed"
FIFTH: list[Cause] = []
FIFTH_HEALTHY: list[Cause] = []


def add(forms: Sequence[str], family: str, name: str, again: dict[str, Any] | None = None, **rest: Any) -> None:
    """One cause in every form. `twin=True`: also a healthy twin, whose launches both have what the cause changes."""
    both, twin = rest.pop("both", {}), rest.pop("twin", False)
    into = FIFTH_HEALTHY if rest.get("healthy") else FIFTH
    for form in forms:
        own = {**BASE[form], **both}
        into.append(Cause(form=form, family=family, name=name, both=own, again=again or {}, **rest))
        if twin:
            alike = {"form": form, "family": "healthy", "name": f"in both launches: {name}", "healthy": True}
            FIFTH_HEALTHY.append(Cause(**alike, both={**own, **(again or {})}))


# ---- configuration, and layers that are wrapped or replaced ------------------------------------------------------------


class Squashed(torch.nn.Module):
    """Weights that go through tanh."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.tanh()


def _squash(script: Any) -> None:
    parametrize.register_parametrization(inner(script).mlp[0], "weight", Squashed())


def _without_norm(script: Any) -> None:
    inner(script).norms[1].forward = lambda x: x


def _sees_the_future(script: Any) -> None:
    for block in inner(script).blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0].flip(1),))
        block.register_forward_hook(lambda module, args, out: out.flip(1))


def _noisy_embedding(script: Any) -> None:
    inner(script).embedding.register_forward_hook(lambda module, args, out: out + 0.05 * torch.randn_like(out))


def _other_default(script: Any) -> None:
    inner(script).norms[0].eps = 0.1


def _attention(script: Any, value: Any) -> None:
    for module in inner(script).modules():
        if hasattr(module, "scaling"):
            module.scaling = value


add((T, D), "model", "weights of one layer go through a parametrization", after=[_squash])
add((A, L), "model", "one norm is skipped: its forward is another function", after=[_without_norm])
add((T, F), "model", "attention sees the future", after=[_sees_the_future])
add((A, F), "model", "noise on the embedding, by a hook", after=[_noisy_embedding])
add((L, D), "model", "eps of one norm", after=[_other_default])
add((H,), "model", "scale of the attention scores", after=[partial(_attention, value=1.0)])
add((H,), "model", "every second position: a scaled rotary factor", {"config": {"rope_parameters": {
    "rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}})  # fmt: skip
add((T, H), "model", "embedding_scale: frequencies scale its gradient", after=[
    lambda s: setattr(s.model.get_input_embeddings() if hasattr(s.model, "get_input_embeddings") else s.model.embedding,
                      "scale_grad_by_freq", True)])  # fmt: skip

# ---- the loss and its factor -------------------------------------------------------------------------------------------


def _mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _tokens(logits, labels).sum() / (labels[:, 1:] >= 0).sum()


def _halved(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.5 * _mean(logits, labels)


def _by_width(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _tokens(logits, labels).sum() / labels[:, 1:].numel()


def _last_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _mean(logits[:, -5:], labels[:, -5:])


def _poly(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    each = _tokens(logits, labels)
    return ((each + 1 - torch.exp(-each)) * (labels[:, 1:] >= 0)).sum() / (labels[:, 1:] >= 0).sum()


def _two_ahead(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.pad(labels[:, 2:], (1, 1), value=-100)


def _kept() -> Any:
    import transformers

    class Kept(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**{k: v for k, v in inputs.items() if k != "labels"})
            loss = 0.25 * _mean(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return Kept


add((F, D), "loss", "half of the loss", {"loss": _halved}, both={"loss": _mean}, twin=True)
add((T, L), "loss", "divided by all positions, padding too", {"loss": _by_width}, both={"loss": _mean, "clip": None}, twin=True)
add((A,), "loss", "only the last tokens count", {"loss": _last_tokens})
add((T, A), "loss", "poly-1 instead of cross entropy", {"loss": _poly})
add((L, F), "loss", "every label is that of two tokens ahead", {"labels": _two_ahead}, twin=True)
add((H,), "loss", "a quarter of the loss, by the script's own Trainer", {"model_kind": _kept}, twin=True)

# ---- data and tokenizer ------------------------------------------------------------------------------------------------


def _token_file(path: Path) -> Path:
    return next(folder / "tokens.npy" for folder in path.parents if (folder / "tokens.npy").exists())


def _rewrite(path: Path, work: Callable[[Any], Any]) -> None:
    file = _token_file(path)
    np.save(file, work(np.load(file)))


def _bos_doubled(rows: Any) -> Any:
    return np.concatenate([np.full_like(rows[:, :1], 2), rows[:, :-1]], axis=1)


def _doubled_row(script: Any) -> None:
    collate = script.collate
    script.collate = lambda rows: collate([rows[0], *rows[:-1]])
    script.feed = None


def _same_order(script: Any) -> None:
    make = script.make_loader
    script.make_loader = lambda rows, epoch=0: make(rows, 0)


def _unskipped_epoch(script: Any) -> None:
    make = script.make_loader
    script.make_loader = lambda rows, epoch=0: make(rows, epoch + 1)


add((T, A, H), "tokenizer", "BOS stands twice: every row moves by one", files=partial(_rewrite, work=_bos_doubled))
add((L, D), "tokenizer", "unknown words get the id of padding", files=partial(
    _rewrite, work=lambda r: np.where(r % 7 == 3, PAD, r)))  # fmt: skip
add((T, F), "data", "the order of the first epoch comes in every epoch", after=[_same_order])
add((T,), "data", "the order is that of the next epoch", after=[_unskipped_epoch])
add((T,), "data", "the first row of a batch stands twice", after=[_doubled_row])
add((L,), "data", "overfit_batches", {"trainer": {"overfit_batches": 4}})
add((H,), "data", "the last batch of an epoch is dropped", {"arguments": {"dataloader_drop_last": True}}, both={"batch": 7})

# ---- optimizer, groups, rates --------------------------------------------------------------------------------------------


def _moved_between_groups(script: Any) -> None:
    one, two = bare(script).param_groups[:2]
    two["params"].append(one["params"].pop())


def _copied_model(script: Any) -> None:
    script.model = copy.deepcopy(script.model)


def _sign(script: Any) -> None:
    for _, state in _params(script)[:3]:
        state["exp_avg"].neg_()


def _signed_in_file(state: Any) -> None:
    for held in list(state["optimizer"]["state"].values())[3:5]:
        held["exp_avg_sq"].mul_(4)


def _eta_min(script: Any) -> None:
    getattr(script.scheduler, "scheduler", script.scheduler).eta_min = 2e-3


def _rounded_gradients(script: Any) -> None:
    for p in inner(script).parameters():
        p.register_post_accumulate_grad_hook(_to_eight_thousandths)


def _to_eight_thousandths(p: Any) -> None:
    p.grad.copy_((p.grad * 8e3).round() / 8e3)


def _group_rate(script: Any) -> None:
    for thing in (getattr(script.scheduler, "scheduler", script.scheduler),):
        thing.base_lrs[0] *= 1.5


add((T, A, F), "groups", "a parameter moved from the decayed group to the other", after=[_moved_between_groups])
add((T,), "optimizer", "the model is copied after the optimizer was made", after=[_copied_model])
add((A, H), "optimizer", "first moments of three tensors have the other sign", after=[_sign])
add((T,), "optimizer", "second moments of two tensors four times as large", files=lambda p: edit(p, _signed_in_file))
add((A, H), "optimizer", "decoupled weight decay is off in every group", after=[partial(_groups, weight_decay=0.0)], both={
    "arguments": {"weight_decay": 0.1}})  # fmt: skip
add((T, L), "schedule", "eta_min of the cosine", after=[_eta_min], both={"scheduler": "cosine"})
add((A, F), "schedule", "base LR of the first group half as large again", after=[_group_rate])
add((T, A), "gradients", "rounded to eight thousandths by a hook", after=[_rounded_gradients])

# ---- precision, averages, files ------------------------------------------------------------------------------------------


def _late_average(script: Any) -> None:
    script.followed = copy.deepcopy(script.model)

    def follow(module: Any, args: Any) -> None:
        script.followed.load_state_dict(module.state_dict())

    script.model.register_forward_pre_hook(follow)


def _shrunk(path: Path) -> None:
    edit(path, lambda state: [value.mul_(0.999) for value in state["model"].values() if value.is_floating_point()])


def _no_average() -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.9)


def _other_decay() -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=0.5)


AVERAGED = {"callbacks": (_no_average,)}
add((L,), "precision", "64-true", {"trainer": {"precision": "64-true"}})
add((T,), "precision", "one block in float64", after=[
    lambda s: (s.model.mlp[0].double(), s.model.mlp[0].register_forward_pre_hook(lambda m, a: (a[0].double(),)),
               s.model.mlp[0].register_forward_hook(lambda m, a, out: out.float()))])  # fmt: skip
add((T,), "average", "follows the weights of the step before", both={"ema": True}, after=[_late_average])
add((L,), "average", "decay of the averaging callback", {"callbacks": (_other_decay,)}, both=AVERAGED, twin=True)
add((L,), "average", "the averaging callback is gone", {"callbacks": ()}, both=AVERAGED)
add((T, F), "checkpoint", "weights a thousandth smaller in the file", files=_shrunk)

# ---- in the middle of a launch -------------------------------------------------------------------------------------------


def _option(script: Any, **options: Any) -> None:
    script.o.update(options)


def _evaluates(script: Any) -> None:
    inner(script).blocks.eval()


add((T, A), "later", "padding is trained from the third step on", at_step=partial(_option, ignored=-1))
add((T, F, D), "later", "half of the loss from the third step on", at_step=partial(_option, loss=_halved), both={"loss": _mean})
add((T, A), "later", "a part is left in evaluation from the third step on", both={"dropout": 0.2}, at_step=_evaluates)
add((A, H), "later", "one rate of the groups is ten times as large from the third step on", at_step=lambda s: bare(
    s).param_groups[0].update(lr=10 * bare(s).param_groups[0]["lr"]))  # fmt: skip

# ---- healthy -------------------------------------------------------------------------------------------------------------

add((T, A, L, F, D), "healthy", "a loss function of the script", both={"loss": _mean}, healthy=True)
add((T, A), "healthy", "cosine with eta_min by the script in both", both={"scheduler": "cosine"}, healthy=True)
add((H,), "healthy", "batches of seven", both={"batch": 7}, healthy=True)
