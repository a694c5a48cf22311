"""Early signs: numbers from inside a model that move before its loss does. Opt-in, for the first rank.

`CHRONICLE_SIGNS=10` measures at every tenth optimizer step of a guarded launch, appends a line to `signs.jsonl` in the launch's
directory, and records an incident `early-sign` (a warning) when a number stays beyond its limit for `IN_A_ROW` measurements:

    update_ratio      the norm of a step's change over the norm of the weights, in a sample of 4,096 elements of each tensor
    qk_spectrum       spectral entropy of the change of Wqᵀ Wk since the measurement before, to first order; the least of
                      a sample of heads, 0 where all change is in one direction (arXiv 2606.28116). For attention with two
                      projections, or one for both, under one of the usual names (`q_proj`, `query`, `c_attn`, `qkv`, …)
    router_entropy    of the share of tokens that each expert has as first choice, 1 is even; of the least even layer.
                      A router is a module beside `experts` whose output holds a number for each

What each was worth in injected causes, and which numbers were measured and are not offered: docs/guard.md and
`benchmarks/early_signs.py`. At other steps a flag is looked at; there is no collective, and nothing of the training is changed.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chronicle.journal.events import Incident
from chronicle.metrics.log import MetricsWriter
from chronicle.resume.faults import shield
from chronicle.resume.fingerprint import own_shard
from chronicle.resume.journal import GuardJournal
from chronicle.resume.learning_rate import is_within_its_step

__all__ = ["RULES", "SIGNS_VARIABLE", "EarlySigns", "SignJudge", "SignRule", "record_signs"]

SIGNS_VARIABLE = "CHRONICLE_SIGNS"  # measure every so many optimizer steps; unset: never
ELEMENTS, LAYERS, HEADS = 4096, 4, 4  # of a sample
TOKENS_PER_EXPERT = 8  # fewer, and the loads of an even router look uneven
FIRST_STEPS = 100  # of a launch: nothing is judged, and nothing is taken for usual
REFERENCE = 20  # measurements whose median is what is usual
IN_A_ROW = 4  # measurements beyond the limit; with 3 there were two false signs in 615,000 healthy steps
PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q_lin", "k_lin"), ("q", "k"))
FUSED = ("qkv", "c_attn", "Wqkv", "qkv_proj", "in_proj", "query_key_value")
HEAD_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead")


@dataclass(frozen=True, slots=True)
class SignRule:
    """A channel is a sign where it is `factor` times what was usual in this launch (below 1: at most that share of it)."""

    channel: str
    factor: float
    meaning: str

    def is_beyond(self, value: float, usual: float) -> bool:
        """Whether one measurement is beyond the limit; what is not finite is."""
        return not (value > self.factor * usual if self.factor < 1.0 else value < self.factor * usual)


RULES = (
    SignRule("update_ratio", 3.0, "each step changes the weights far more than it did, as with an LR too high"),
    SignRule("qk_spectrum", 0.5, "queries and keys change in few directions, as with low precision, or an LR too high"),
    SignRule("router_entropy", 0.7, "tokens go to few experts, as where a router collapses"),
)


class EarlySigns:
    """Measures one model while it trains. `told` gets the steps since `attach`, and the numbers, after each measured step.

    An error in here ends the measuring, and goes to `failed` once; it never reaches the training.
    """

    def __init__(
        self, told: Callable[[int, dict[str, float]], None], every: int, failed: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._told, self._every, self._failed = told, every, failed
        self._steps = 0
        self._looks = False  # the step that is being taken is measured
        self._routed: list[Any] = []
        self._before: list[tuple[Any, Any]] = []
        self._pairs: list[QueryKey] = []
        self._handles: list[Any] = []

    def attach(self, models: Iterable[Any], optimizers: Sequence[Any]) -> None:
        """Begin to measure these. The first optimizer's steps are counted."""
        keep = self._handles.append
        for model in models:
            self._pairs += query_keys(model)
            for router in _routers(model):
                keep(router.register_forward_hook(shield(self._see_router, self._fail)))
        for optimizer in optimizers[:1]:
            keep(optimizer.register_step_pre_hook(shield(self._stepping, self._fail)))
            keep(optimizer.register_step_post_hook(shield(self._stepped, self._fail)))
        self._looks = self._every == 1

    def end(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._looks = False

    def _fail(self, problem: Exception) -> None:
        self.end()
        self._failed(problem)

    def _see_router(self, router: Any, args: Any, output: Any) -> None:
        if self._looks and router.training and (found := router_entropy(output)) is not None:
            self._routed.append(found)

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._looks and not is_within_its_step(optimizer):
            tensors = [own_shard(p.detach()) for group in optimizer.param_groups for p in group["params"]]
            self._before = [(part, part.clone()) for part in map(_sample, tensors) if part.numel() > 1]

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_within_its_step(optimizer):
            return
        self._steps += 1
        if self._looks and (values := self._values()):
            self._told(self._steps, values)
        self._looks = (self._steps + 1) % self._every == 0

    def _values(self) -> dict[str, float]:
        import torch

        found: dict[str, float] = {}
        moved = [((after.float() - old.float()).square().sum(), old.float().square().sum()) for after, old in self._before]
        if moved:
            changes, weights = (float(torch.stack([pair[i].cpu() for pair in moved]).sum()) for i in (0, 1))
            found["update_ratio"] = math.sqrt(changes / max(weights, 1e-30))
        spectra = [spectrum for pair in self._pairs if (spectrum := pair.spectrum()) is not None]
        if spectra:
            found["qk_spectrum"] = min(spectra)
        if self._routed:
            found["router_entropy"] = float(torch.stack(self._routed).min())
        self._routed, self._before = [], []
        return found


def _sample(tensor: Any) -> Any:
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)[:0]  # a copy would not see the step
    start = max(0, (flat.numel() - ELEMENTS) // 2)
    return flat[start : start + ELEMENTS]


# ---- queries and keys ------------------------------------------------------------------------------------------------


class QueryKey:
    """The query and key weights of one attention layer, as they were at the last measurement."""

    def __init__(self, read: Callable[[], tuple[Any, Any]], heads: int) -> None:
        self._read, self._heads = read, heads
        self._last: tuple[Any, Any] | None = None

    def spectrum(self) -> float | None:
        """Spectral entropy of the change since the call before, the least of the sampled heads; None at the first call.

        The product of a head, ΔWqᵀ Wk + Wqᵀ ΔWk, has rank 2 · head width at most, so that its singular values are those of a
        matrix of that size.
        """
        import torch

        now = tuple(weight.detach().float().clone() for weight in self._read())
        last, self._last = self._last, (now[0], now[1])
        if last is None:
            return None
        width = now[0].shape[0] // self._heads
        share = self._heads // max(1, now[1].shape[0] // width)  # heads that share a key
        least = 1.0
        for head in range(0, self._heads, max(1, self._heads // HEADS)):
            rows, keys = slice(head * width, (head + 1) * width), head // max(1, share)
            of_keys = slice(keys * width, (keys + 1) * width)
            q, k = last[0][rows], last[1][of_keys]
            left, right = torch.cat([now[0][rows] - q, q]), torch.cat([k, now[1][of_keys] - k])
            power = torch.linalg.svdvals(torch.linalg.qr(left.T)[1] @ torch.linalg.qr(right.T)[1].T).square()
            shares = power / power.sum().clamp(min=1e-30)
            least = min(least, float(torch.special.entr(shares).sum()) / math.log(2 * width))
        return least


def query_keys(model: Any) -> list[QueryKey]:
    """The attention layers whose query and key weights are known by their names, a sample of `LAYERS`."""
    found = [pair for module in model.modules() if (pair := _query_key(module)) is not None]
    return found[:: max(1, len(found) // LAYERS)][:LAYERS]


def _query_key(module: Any) -> QueryKey | None:
    heads = next((count for name in HEAD_COUNTS if isinstance(count := getattr(module, name, None), int) and count > 0), None)
    if heads is None:  # newer transformers keep it in the layer's config
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    for query, key in PAIRS:
        q, k = (_weight_of(module, name) for name in (query, key))
        if _is_matrix(q) and _is_matrix(k) and q.shape[0] % heads == 0 and k.shape[0] % (q.shape[0] // heads) == 0:
            return QueryKey(partial(_both, q, k), heads)
    for name in FUSED:
        weight: Any = _weight_of(module, name)
        across = int(type(getattr(module, name, None)).__name__ == "Conv1D")  # of transformers: its weight lies the other way
        if not _is_matrix(weight):
            continue
        rows, columns = weight.shape[across], weight.shape[1 - across]
        if rows == 3 * columns and columns % heads == 0:
            return QueryKey(partial(_first_two, weight, across), heads)
    return None


def _weight_of(module: Any, name: str) -> Any:
    return getattr(getattr(module, name, None), "weight", None)


def _both(q: Any, k: Any) -> tuple[Any, Any]:
    return q, k


def _first_two(weight: Any, across: int) -> tuple[Any, Any]:
    q, k, _ = (weight.T if across else weight).chunk(3)
    return q, k


def _is_matrix(weight: Any) -> bool:
    return getattr(weight, "ndim", 0) == 2 and weight.requires_grad and own_shard(weight) is weight  # whole on this rank


# ---- routers ---------------------------------------------------------------------------------------------------------


def _routers(model: Any) -> list[Any]:
    """Modules named as routers that stand beside a module `experts`."""
    return [
        child for module in model.modules() if hasattr(module, "experts")
        for name, child in module.named_children() if name in ("gate", "router", "wg", "gating")
    ]  # fmt: skip


def router_entropy(output: Any) -> Any:
    """The entropy of the first choices in a router's output, as a share of an even one; None where there are too few tokens.

    Known: a tensor (…, experts) of logits or shares, alone or the first such in a tuple.
    """
    import torch

    tensors = [part for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, torch.Tensor)]
    scores = next((part.detach() for part in tensors if part.is_floating_point() and part.dim() > 1), None)
    if scores is None or scores.shape[-1] < 2:
        return None
    experts = scores.shape[-1]
    first = scores.reshape(-1, experts).argmax(-1)
    if first.numel() < TOKENS_PER_EXPERT * experts:
        return None
    loads = torch.bincount(first, minlength=experts).float() / first.numel()
    return torch.special.entr(loads).sum() / math.log(experts)


# ---- what is a sign --------------------------------------------------------------------------------------------------


class SignJudge:
    """Names a channel once it has stayed beyond its limit for `IN_A_ROW` measurements, and again after it has been back.

    What is usual is the median of the launch's first `REFERENCE` measurements behind its first steps and its warm-up: while
    the LR still rises, they begin anew.
    """

    def __init__(self, rules: Sequence[SignRule] = RULES) -> None:
        self._rules = rules
        self._first: dict[str, list[float]] = {}
        self._beyond: dict[str, list[int]] = {rule.channel: [] for rule in rules}  # the steps
        self._top = 0.0  # the largest LR

    def see(self, step: int, values: Mapping[str, float], lr: float = 0.0) -> list[tuple[SignRule, int, float]]:
        """Fold one measurement; returns each rule that is broken now, the step at which that began, and what was usual."""
        found = []
        rises, self._top = lr > self._top * 1.001, max(lr, self._top)
        for rule in self._rules:
            value = values.get(rule.channel)
            if value is None or step <= FIRST_STEPS:
                continue
            first = self._first.setdefault(rule.channel, [])
            if len(first) < REFERENCE:
                if rises:
                    first.clear()
                first.append(value)
                continue
            usual, beyond = statistics.median(first), self._beyond[rule.channel]
            if rule.is_beyond(value, usual):
                beyond.append(step)
                if len(beyond) == IN_A_ROW:
                    found.append((rule, beyond[0], usual))
            else:
                beyond.clear()
        return found


# --- In a launch


def record_signs(
    models: Sequence[Any], optimizers: Sequence[Any], journal: GuardJournal, environ: Mapping[str, str], *, first_step: int,
    failed: Callable[[Exception], None],
) -> EarlySigns | None:  # fmt: skip
    """Measure this launch, where its environment asks for it: `signs.jsonl` and incidents. `first_step`: steps completed."""
    wanted, launch_dir = environ.get(SIGNS_VARIABLE, "").strip(), environ.get("CHRONICLE_LAUNCH_DIR")
    if wanted in ("", "0", "off"):
        return None
    if not wanted.isdigit():
        journal.say("early signs", f"{SIGNS_VARIABLE} is `{wanted}`: expected a number of steps; no early signs are measured")
        return None
    if not launch_dir or environ.get("RANK", "0") != "0":
        return None
    writer, judge = MetricsWriter(Path(launch_dir) / "signs.jsonl", aloud=False), SignJudge()

    def told(steps: int, values: dict[str, float]) -> None:
        step, lr = first_step + steps, max((float(g.get("lr", 0.0)) for o in optimizers for g in o.param_groups), default=0.0)
        writer.write(step, values)
        for rule, since, usual in judge.see(steps, values, lr):
            value = values[rule.channel]
            text = f"{rule.channel} is {value:.3g} (usual in this launch {usual:.3g}): {rule.meaning}"
            event = Incident(
                text=text, kind="early-sign", tier="warn", status="open", onset_step=first_step + since, alarm_step=step,
                channels=(rule.channel,), launch=journal.launch,
            )  # fmt: skip
            journal.write(event, step=step, title=text)
            journal.say(f"early sign {rule.channel}", f"early sign at step {step}: {text}")

    signs = EarlySigns(told, int(wanted), failed)
    signs.attach(models, optimizers)
    return signs
