"""Third list of causes, frozen on 2026-11-23 before the guard was tried on them, by somebody who had read the first two.

None stands in `causes.py`, `fresh.py`, `planted_bugs` or `benchmarks/envelope`. One form is new: LoRA adapters of `peft` on a
frozen Llama, by a loop of its own that saves the adapter alone. `python -m benchmarks.strange_causes --third` plays them.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.strange_causes.causes import Cause, _change_state, _groups
from benchmarks.strange_causes.fresh import BASE as FRESH_BASE
from benchmarks.strange_causes.fresh import bare, inner
from benchmarks.strange_causes.scripts import BATCH, FORMS, PAD, VOCABULARY, TorchScript

__all__ = ["THIRD", "THIRD_HEALTHY"]

T, A, H, L, F, D, P = "torch", "accelerate", "transformers", "lightning", "fabric", "deepspeed", "peft"
BASE: dict[str, dict[str, Any]] = {**FRESH_BASE, P: {}}
THIRD: list[Cause] = []
THIRD_HEALTHY: list[Cause] = []


class PeftScript(TorchScript):
    """The plain loop over a Llama with a LoRA adapter; `lora_options` of the adapter, `base_seed` of the frozen weights."""

    def make_model(self) -> Any:
        import peft
        import transformers

        torch.manual_seed(self.o.get("base_seed", 0))
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=PAD, **sizes)
        base = transformers.LlamaForCausalLM(config)
        torch.manual_seed(1)
        options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **self.o.get("lora_options", {})}
        return peft.get_peft_model(base, peft.LoraConfig(**options))

    def loss(self, logits: Any, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits.logits, labels)

    def save(self) -> Path:
        import peft

        path = self.folder / f"adapter-{self.steps}.pt"
        state = {"adapter": peft.get_peft_model_state_dict(self.model), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "scheduler": self.scheduler.state_dict(), "step": self.steps, "rng": torch.get_rng_state()}, path)
        return path

    def load(self, path: Path) -> None:
        import peft

        state = torch.load(path, weights_only=False)
        peft.set_peft_model_state_dict(self.model, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps = state["step"]
        torch.set_rng_state(state["rng"])


FORMS[P] = PeftScript


def add(forms: Sequence[str], family: str, name: str, again: dict[str, Any] | None = None, **rest: Any) -> None:
    """One cause in every form."""
    both = rest.pop("both", {})
    into = THIRD_HEALTHY if rest.get("healthy") else THIRD
    into.extend(
        Cause(form=form, family=family, name=name, both={**BASE[form], **both}, again=again or {}, **rest) for form in forms
    )


def tokens(path: Path, work: Any) -> None:
    """Rewrite the file of rows."""
    for folder in (path, *path.parents[:3]):
        if (folder / "tokens.npy").exists():
            rows = np.load(folder / "tokens.npy")
            np.save(folder / "tokens.npy", work(rows))
            return
    raise FileNotFoundError(path)


def edit(path: Path, work: Any) -> None:
    """Rewrite one checkpoint file of torch."""
    state = torch.load(path, weights_only=False)
    work(state)
    torch.save(state, path)


# ---- adapters on a frozen base ---------------------------------------------------------------------------------------


def _thaw_norms(script: Any) -> None:
    for name, parameter in script.model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(True)


def _base_in_half(script: Any) -> None:
    for parameter in script.model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16().float()


def _drop_b(state: Any) -> None:
    state["adapter"] = {name: value for name, value in state["adapter"].items() if "lora_B" not in name}


add((P,), "adapter", "the frozen base is another revision", {"base_seed": 5})
add((P,), "adapter", "alpha doubled", {"lora_options": {"lora_alpha": 16}})
add((P,), "adapter", "rank-stabilised scaling", {"lora_options": {"use_rslora": True}})
add((P,), "adapter", "dropout of the adapter", {"lora_options": {"lora_dropout": 0.3}})
add((P,), "adapter", "merged into the base, and still there", after=[lambda s: s.model.merge_adapter()])
add((P,), "adapter", "the base rounded to bfloat16", after=[_base_in_half])
add((P,), "adapter", "norms of the base take gradients", after=[_thaw_norms])
add((P,), "adapter", "only one half of the adapter in the file", files=lambda p: edit(p, _drop_b))

# ---- tokens and rows -------------------------------------------------------------------------------------------------


def _exchange_ids(rows: Any) -> Any:
    out = rows.copy()
    out[rows == 7], out[rows == 8] = 8, 7
    return out


def _spoil_rows(rows: Any) -> Any:
    out = rows.copy()
    out[::16, :5] = 3
    return out


def _by_length(rows: Any) -> Any:
    lengths = [len(rows[i]) for i in range(len(rows))]
    return sorted(range(len(rows)), key=lengths.__getitem__)


def _short_ones(rows: Any) -> Any:
    chosen = [i for i in range(len(rows)) if len(rows[i]) < 9]
    return torch.utils.data.SubsetRandomSampler(chosen, generator=torch.Generator().manual_seed(4))


add((T, A, P), "tokenizer", "two ids exchanged in the tokenised file", files=lambda p: tokens(p, _exchange_ids))
add((H, L), "data", "one row in sixteen spoilt", files=lambda p: tokens(p, _spoil_rows))
add((T, F), "data", "sorted by length", {"sampler": _by_length})
add((T,), "data", "only the short rows are drawn", {"sampler": _short_ones})
add((A, L), "data", "every row twice", both={"split": slice(None)}, files=lambda p: tokens(p, lambda r: np.tile(r, (2, 1))))
add((L,), "data", "rows in the other order", files=lambda p: tokens(p, lambda rows: rows[::-1].copy()))

# ---- model, precision, frozen ----------------------------------------------------------------------------------------


def _norms_in_half(script: Any) -> None:
    for norm in inner(script).norms:
        norm.to(torch.bfloat16), norm.register_forward_pre_hook(lambda m, a: (a[0].bfloat16(),))
        norm.register_forward_hook(lambda m, a, out: out.float())


def _max_norm(script: Any) -> None:
    inner(script).embedding.max_norm = 0.5


def _not_loaded(state: Any) -> None:
    for name, value in state["model"].items():
        if name.startswith("blocks.1"):
            state["model"][name] = torch.randn_like(value) * 0.1


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
add((H,), "model", "four heads instead of two, of the same shapes", {"config": HEADS})
add((H,), "model", "a third layer, which no file has", {"config": {"num_hidden_layers": 3}})
add((T, F), "model", "the embedding is renormalised by max_norm", after=[_max_norm])
add((T, A), "precision", "norms in bfloat16", after=[_norms_in_half])
add((L,), "precision", "bf16-true", {"trainer": {"precision": "bf16-true"}})
add((D,), "precision", "bf16 of the configuration", {"config": {"bf16": {"enabled": True}}})
add((A, L), "frozen", "one bias takes no gradient", {"frozen": ("blocks.0.out.bias",)})
add((T,), "checkpoint", "one block of the file was never trained", files=lambda p: edit(p, _not_loaded))

# ---- optimizer, schedule, averages, scaler ---------------------------------------------------------------------------


def _reverse_groups(script: Any) -> None:
    bare(script).param_groups.reverse()


def _scale_less(state: Any) -> None:
    state["scaler"]["scale"] /= 64


def _other_decay(script: Any) -> None:
    script.ema.multi_avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)


add((T, A), "optimizer", "order of the two groups", after=[_reverse_groups])
add((F, H), "optimizer", "eps of Adam", after=[partial(_groups, eps=1e-2)])
add((L, P), "optimizer", "second moments a hundred times as large", after=[
    partial(_change_state, key="exp_avg_sq", work=lambda t: 100 * t)])  # fmt: skip
add((A,), "optimizer", "a tenth of the clipping", {"clip": 0.05})
add((T,), "scheduler", "Plateau looks for the largest", after=[lambda s: setattr(s.scheduler, "mode", "max")], both={
    "scheduler": "plateau"})  # fmt: skip
add((P,), "scheduler", "left out of the load", after=[
    lambda s: s.scheduler.__init__(s.optimizer, lambda step: min(1.0, (step + 1) / 6))])  # fmt: skip
add((T,), "scaler", "its scale in the file a 64th", both={"scaler": True}, files=lambda p: edit(p, _scale_less))
add((T,), "average", "equals the weights", both={"ema": True}, after=[
    lambda s: s.ema.module.load_state_dict(s.model.state_dict())])  # fmt: skip
add((T,), "average", "forgets at half instead of a thousandth", both={"ema": True}, after=[_other_decay])

# ---- generators, whole checkpoints -----------------------------------------------------------------------------------


def _without_generators(path: Path) -> None:
    for file in path.glob("rng_state*"):
        file.unlink()


def _of_other_run(path: Path, form: str) -> None:
    folder = path.parent / "other"
    folder.mkdir()
    script: Any = FORMS[form](folder, folder / "logs" / "other", {"lr": 2e-3})
    torch.manual_seed(99)
    script.build()
    script.train(18)
    other = script.save()
    script.train(20)
    script.finish()
    path.write_bytes(other.read_bytes())


add((H,), "generators", "another seed in the arguments, with dropout", {"arguments": {"seed": 7}}, both={
    "config": {"attention_dropout": 0.2}})  # fmt: skip
add((H,), "generators", "rng_state.pth is gone, with dropout", both={"config": {"attention_dropout": 0.2}},
    files=_without_generators)  # fmt: skip
add((T,), "checkpoint", "the whole file is another run's", files=partial(_of_other_run, form=T))
add((F,), "checkpoint", "the whole file is another run's", files=partial(_of_other_run, form=F))

# ---- healthy ---------------------------------------------------------------------------------------------------------

add((P,), "healthy", "nothing changes", healthy=True)
add((P,), "healthy", "dropout of the adapter in both launches", both={"lora_options": {"lora_dropout": 0.2}}, healthy=True)
add((P,), "healthy", "accumulation", both={"accumulation": 2}, healthy=True)
add((T, F), "healthy", "sorted by length in both launches", both={"sampler": _by_length}, healthy=True)
add((L,), "healthy", "one bias frozen in both launches", both={"frozen": ("blocks.0.out.bias",)}, healthy=True)
add((T,), "healthy", "average and scaler", both={"ema": True, "scaler": True}, healthy=True)
add((A, L), "healthy", "rows doubled in both launches", both={"split": slice(None), "batch": 2 * BATCH}, healthy=True)

assert VOCABULARY > 8
