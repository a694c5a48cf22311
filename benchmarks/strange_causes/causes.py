"""What is changed between the launch that saves and the one that resumes; and healthy twins, in which nothing that matters is.

A cause
is one line: forms, name, options of the resume, and where needed hooks on its files, after its load or at a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.strange_causes.scripts import BLOCK, NUM_ROWS, SAVED_AT, VOCABULARY, Hook, write_tokens

__all__ = ["CAUSES", "HEALTHY", "Cause"]

T, A = "torch", "accelerate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One accident in one form. `both`: options of both launches; `again`: of the resume."""

    form: str
    family: str
    name: str
    both: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, Any] = field(default_factory=dict)
    after: Sequence[Hook] = ()
    files: Callable[[Path], object] | None = None
    at_step: Hook | None = None  # at the third step of the resume
    in_both: bool = False  # `at_step` was so in the first launch too, at the same step
    healthy: bool = False


CAUSES: list[Cause] = []
HEALTHY: list[Cause] = []


def add(forms: Sequence[str], family: str, name: str, again: Mapping[str, Any] | None = None, **rest: Any) -> None:
    """One cause in every form."""
    both = rest.pop("both", {})
    into = HEALTHY if rest.get("healthy") else CAUSES
    into.extend(
        Cause(form=form, family=family, name=name, both=both, again=again or {}, **rest) for form in forms
    )


# ---- what is trained -------------------------------------------------------------------------------------------------

add((T,), "model", "another base of the rotary positions (a buffer that is not saved)", {"theta": 500_000.0})
add((T, A), "model", "attention in a sliding window", {"window": 3})
add((T,), "model", "gelu became relu (a function in an attribute)", {"act": functional.relu})
add((A,), "model", "RMSNorm instead of LayerNorm, loaded without a look", {"norm": torch.nn.RMSNorm, "strict": False})
add((T,), "model", "RMSNorm instead of LayerNorm, loaded without a look", {"norm": torch.nn.RMSNorm, "strict": False})
add((T, A), "model", "temperature of the logits", {"temperature": 2.0})
add((T, A), "model", "scale of the LoRA branch", {"lora": 0.25}, both={"lora": 0.5})
add((T,), "model", "activations quantised from now on", {"quantised": True})
add((T,), "model", "embedding thawed", {"frozen": ()}, both={"frozen": ("embedding",)})
add((T,), "model", "tied head comes apart", {"tied": False}, both={"tied": True})
add((T, A), "model", "a part of the weights loaded: the head is another one", after=[
    lambda s: torch.nn.init.normal_(s.model.head.weight, std=0.05)])  # fmt: skip

# ---- the loss --------------------------------------------------------------------------------------------------------

add((T, A), "loss", "label smoothing", {"smoothing": 0.2})
add((T, A), "loss", "padding is trained: ignore_index lost", {"ignored": -1})
add((T, A), "loss", "classes weighted otherwise", {"weights": (0.2, 2.0)})
add((T,), "loss", "sum instead of mean", {"reduction": "sum"}, both={"clip": None})
add((T, A), "loss", "an auxiliary loss is added", {"auxiliary": 0.5})
add((T, A), "loss", "labels shifted twice", {"labels": lambda ids, labels: functional.pad(labels[:, 1:], (0, 1), value=-100)})


def _own_loss(outputs: Any, labels: Any, **_: Any) -> Any:
    flat = outputs.logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.3)



# ---- data ------------------------------------------------------------------------------------------------------------


def _other_file(path: Path) -> None:
    place = path.parent if path.is_file() else path.parents[1] if path.parent.name in ("checkpoints", "kept") else path.parent
    for folder in (place, place.parent):
        if (folder / "tokens.npy").exists():
            write_tokens(folder / "tokens.npy", seed=9)
            return
    raise FileNotFoundError(place)


FORMS = (T, A)
add(FORMS, "data", "another file of the same name and size", files=_other_file)
add(FORMS, "data", "filtered: a part of the rows", {"split": slice(0, 64)})
add((T, A), "data", "another seed of the order", {"seed": 5, "arguments": {"data_seed": 11}})
add((T,), "data", "augmentation with other noise", {"noise": 0.4}, both={"noise": 0.1})
add((T, A), "data", "padding on the other side", {"side": "left"})
add((T, A), "data", "the vocabulary is another one: every id moves", {"mapping": 5})
add((T, A), "data", "other labels of the same inputs", {"labels": lambda ids, labels: torch.where(labels > 20, 3, labels)})
add((T,), "data", "shorter sequences", {"block": BLOCK // 2})
add((T,), "data", "shuffling switched off", {"shuffle": False})
add((A,), "data", "the last batch is dropped", {"drop_last": True, "batch": 9}, both={"batch": 9})
add((T,), "data", "the epoch starts again", {"skip": False})

# ---- batch -----------------------------------------------------------------------------------------------------------

add((T,), "batch", "accumulation of the loop's own halved", {"accumulation": 1}, both={"accumulation": 2})
add((T,), "batch", "accumulated loss is no longer divided", {"divide": False}, both={"accumulation": 2, "clip": None})
add((T,), "batch", "twice the micro-batch", {"batch": 16})

# ---- optimizer -------------------------------------------------------------------------------------------------------


def _params(script: Any) -> list[Any]:
    optimizer = getattr(script.optimizer, "optimizer", script.optimizer)
    return [(p, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]


def _change_state(script: Any, *, key: str, work: Callable[[Any], Any], every: int = 1) -> None:
    for index, (_, state) in enumerate(_params(script)):
        if index % every == 0:
            state[key] = work(state[key])


def _groups(script: Any, **values: Any) -> None:
    for group in script.optimizer.param_groups:
        group.update(values)


def _half_lost(script: Any) -> None:
    optimizer = getattr(script.optimizer, "optimizer", script.optimizer)
    for param, _ in _params(script)[::2]:
        del optimizer.state[param]


def _rounded(script: Any) -> None:
    with torch.no_grad():
        for param, _ in _params(script):
            param.copy_(param.bfloat16())


def _swap_groups(script: Any) -> None:
    one, two = script.optimizer.param_groups[:2]
    one["weight_decay"], two["weight_decay"] = two["weight_decay"], one["weight_decay"]


add((T,), "optimizer", "epsilon of the arguments", after=[partial(_groups, eps=1e-4)])
add((T,), "optimizer", "second moments of one tensor in three are zero", after=[
    partial(_change_state, key="exp_avg_sq", work=lambda t: t * 0, every=3)])  # fmt: skip
add((A,), "optimizer", "step counters begin again", after=[partial(_change_state, key="step", work=lambda t: t * 0)])
add((T, A), "optimizer", "moments rounded to bfloat16 and back", after=[
    partial(_change_state, key="exp_avg", work=lambda t: t.bfloat16().float())])  # fmt: skip
add((T,), "optimizer", "weight decay of the two groups exchanged", after=[_swap_groups], both={
    "arguments": {"weight_decay": 0.1}})  # fmt: skip
add((T,), "optimizer", "other parameters in the decayed group", {"decay_all": False})
add((T, A), "optimizer", "Adam instead of AdamW, with its state", {"optimizer": torch.optim.Adam})
add((A,), "optimizer", "master weights lost: weights rounded to bfloat16", after=[_rounded])
add((A,), "optimizer", "`maximize` on", after=[partial(_groups, maximize=True)])
add((T, A), "optimizer", "clipping removed", {"clip": None})
add((T,), "optimizer", "gradients are never zeroed again", {"zero_grad": False})

# ---- scheduler -------------------------------------------------------------------------------------------------------

add((T,), "scheduler", "Plateau begins with another best", {"parts": ("model", "optimizer", "step")}, both={
    "scheduler": "plateau"})  # fmt: skip
add((T, A), "scheduler", "stepped twice a step", {"steps_of_scheduler": 2})
add((T, A), "scheduler", "never stepped again", {"steps_of_scheduler": 0})
add((T,), "scheduler", "T_max set from the arguments", after=[lambda s: setattr(s.scheduler, "T_max", 200)], both={
    "scheduler": "cosine"})  # fmt: skip

# ---- precision, averages, generators, checkpoints ------------------------------------------------------------------------

add((T,), "precision", "autocast off", {"autocast": False}, both={"autocast": True})
add((A,), "precision", "mixed precision off", {"autocast": False}, both={"autocast": True})
add((T,), "precision", "the loss scaler begins again", {"lost": ("scaler",)}, both={"scaler": True})
add((T,), "precision", "double precision from now on", after=[lambda s: s.model.double()])
add((T,), "average", "average lost", {"lost": ("ema",)}, both={"ema": True})
add((T,), "average", "average becomes the model", both={"ema": True}, after=[
    lambda s: s.model.load_state_dict(s.ema.module.state_dict())])  # fmt: skip
add((T, A), "generators", "another seed after the load, with dropout", both={"dropout": 0.2}, after=[
    lambda s: torch.manual_seed(77)])  # fmt: skip


def _of_another_run(path: Path) -> None:
    """The file of another run: equal shapes, other weights and moments."""
    state = torch.load(path, weights_only=False)
    for name, value in state["model"].items():
        state["model"][name] = value + 0.01 * torch.randn_like(value)
    torch.save(state, path)


add((T,), "checkpoint", "weights of another run, moments of this one", files=_of_another_run)


def _rename(path: Path) -> None:
    state = torch.load(path, weights_only=False)
    state["model"] = {name.replace("mlp.", "ffn."): value for name, value in state["model"].items()}
    torch.save(state, path)


add((T,), "checkpoint", "renamed layers, loaded with strict=False", {"strict": False}, files=_rename)


def _leave_gradients(script: Any) -> None:
    script.model(torch.full((2, 8), 5)).square().mean().backward()


add((A,), "gradients", "a forgotten backward pass before the first step", after=[_leave_gradients])

# ---- acting later ----------------------------------------------------------------------------------------------------

add((T, A), "later", "model left in evaluation mode after the third step", both={"dropout": 0.1}, at_step=lambda s: (
    s.model.eval()))  # fmt: skip
add((T,), "later", "LR set to ten times at the third step", at_step=partial(_groups, lr=5e-2))
add((T,), "later", "a layer is replaced at the third step: the optimizer keeps the old one", at_step=lambda s: setattr(
    s.model, "head", torch.nn.Linear(16, VOCABULARY, bias=False)))  # fmt: skip
add((A,), "later", "gradients lose a factor of ten from the third step on", at_step=lambda s: _scale(s))


def _scale(script: Any) -> None:
    for parameter in script.model.parameters():
        parameter.register_hook(lambda g: g * 0.1)


# ---- healthy ---------------------------------------------------------------------------------------------------------

add(FORMS, "healthy", "nothing changes", healthy=True)
add((T, A), "healthy", "dropout", both={"dropout": 0.2, "config": {"attention_dropout": 0.2}}, healthy=True)
add((T,), "healthy", "compiled", {"compiled": True}, healthy=True)
add((T,), "healthy", "fused optimizer", {"fused": True}, healthy=True)
add((T, A), "healthy", "tied head", both={"tied": True}, healthy=True)
add((T,), "healthy", "loss scaler", both={"scaler": True}, healthy=True)
add((T, A), "healthy", "autocast", both={"autocast": True}, healthy=True)
add((T,), "healthy", "average", both={"ema": True}, healthy=True)
add((T, A), "healthy", "accumulation", both={"accumulation": 2}, healthy=True)
add((T,), "healthy", "generators not restored, with dropout", {"rng": False}, both={"dropout": 0.2, "rng": False}, healthy=True)
add((T,), "healthy", "plateau", both={"scheduler": "plateau"}, healthy=True)
add((T, A), "healthy", "no clipping", both={"clip": None}, healthy=True)
add((T,), "healthy", "augmentation", both={"noise": 0.1}, healthy=True)
add((T, A), "healthy", "label smoothing", both={"smoothing": 0.1}, healthy=True)
add((T,), "healthy", "SGD", both={"optimizer": torch.optim.SGD}, healthy=True)
add((A,), "healthy", "two loader workers", {"fast_loader": 2}, healthy=True)

assert SAVED_AT < 30 and NUM_ROWS % 8 == 0
