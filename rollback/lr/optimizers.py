"""Whether the update of a saved optimizer scales with `lr`: told from its own fields, by the formulas below. Pure.

An optimizer is of a family when its parameter groups have no fields but those of the row, and its state no tensors but those.
Then the formula of the row is its update, in which `lr` is a factor. Every other optimizer is an assumption, by name. Four
kinds are known not to scale: they are a doubt, and a rollback of their LR is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rollback.checkpoint.state import OptimizerState, names_lr


@dataclass(frozen=True, slots=True)
class Family:
    """`formula` is one step; `needs` are fields that every group has, `fields` further ones, `moments` the tensors kept."""

    formula: str
    needs: frozenset[str]
    fields: frozenset[str]
    moments: frozenset[str]


def _family(formula: str, needs: str, fields: str, moments: str) -> Family:
    return Family(formula, frozenset(needs.split()), frozenset(fields.split()), frozenset(moments.split()))


# torch/optim/*.py (2.13); transformers/optimization.py; apex and DeepSpeed `FusedAdam`; bitsandbytes/optim/optimizer.py
FAMILIES = (
    _family("p -= lr * m", "momentum dampening nesterov", "", "momentum_buffer"),
    _family("p -= lr * m / (sqrt(v) + eps)", "betas eps",
            "amsgrad momentum_decay decoupled_weight_decay correct_bias bias_correction adam_w_mode",
            "exp_avg exp_avg_sq max_exp_avg_sq exp_inf"),
    _family("p -= lr * g / (sqrt(sum) + eps)", "lr_decay initial_accumulator_value", "eps", "sum"),
    _family("p -= lr * g * sqrt(u) / sqrt(v)", "rho eps", "", "square_avg acc_delta"),
    _family("p -= lr * m, m of g / sqrt(v)", "alpha centered momentum", "eps", "square_avg momentum_buffer grad_avg"),
    _family("p -= lr * sign(m)", "betas", "", "exp_avg"),
    _family("p -= lr * orthogonal(m)", "ns_coefficients ns_steps momentum", "nesterov eps adjust_lr_fn", "momentum_buffer"),
    _family("p -= lr * rms(p) * g / sqrt(row * col)", "relative_step scale_parameter",
            "warmup_init clip_threshold decay_rate beta1 eps", "exp_avg exp_avg_sq exp_avg_sq_row exp_avg_sq_col"),
    _family("p -= lr * m / (sqrt(v) + eps), quantised", "betas eps", "alpha t_alpha t_beta3",
            "state1 state2 absmax1 absmax2 qmap1 qmap2"),
)  # fmt: skip
_ANY_GROUP = """
    lr initial_lr max_lr min_lr lr_scale lr_mult params param_names name weight_decay base_momentum max_momentum step
    maximize foreach capturable differentiable fused
"""
_OF_ANY_GROUP = frozenset(_ANY_GROUP.split())


def assumption_of(optimizer: OptimizerState) -> str:
    """Why it is only assumed that the update scales with `lr`; "" where a formula shows it."""
    fields = frozenset().union(*(group.keys() for group in optimizer.groups)) - _OF_ANY_GROUP
    moments = frozenset(optimizer.moments)
    for family in FAMILIES:
        if family.needs <= fields <= family.needs | family.fields and moments <= family.moments:
            return ""
    odd = ", ".join(sorted(map(str, fields)) or ["no fields"])
    return f"its update may not scale with the LR: the optimizer in `{optimizer.file}` is of no known family ({odd[:60]})"


# --- Optimizers whose step is known not to follow `lr`

# (fields of a group, what they mean): all of the fields of one row must be there
_OTHER_STEPS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"etas", "step_sizes"}), "Rprop uses `lr` for its first step only: its step sizes are in `state.*.step_size`"),
    (frozenset({"lambd", "alpha", "t0"}), "ASGD takes its next step with `state.*.eta`, which is not proportional to `lr`"),
    (frozenset({"weight_sum"}), "a schedule-free optimizer weighs its steps by their LRs (`weight_sum`)"),
    (frozenset({"d"}), "Prodigy or D-Adaptation finds its own step size `d` beside `lr`, and grows it again"),
    (frozenset({"d_coef"}), "Prodigy finds its own step size `d` beside `lr`, and grows it again"),
)
_KNOWN_LR_FIELDS = frozenset({"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "lr_mult", "lr_decay", "lr_decay_rate"})


def why_not_by_lr(optimizer: OptimizerState, logs: frozenset[str]) -> Iterator[str]:
    """What is known to decide the step besides `lr`. `logs` are fields that their writer never reads back."""
    told = []
    for index, group in enumerate(optimizer.groups):
        given = {name: value for name, value in group.items() if name not in logs}
        told += [f"{what} (`{optimizer.file}`, group {index})" for what in _of_group(given, optimizer) if what not in told]
    if "step_size" in optimizer.moments and not told:
        told.append(f"the optimizer in `{optimizer.file}` keeps a step size for each parameter (`state.*.step_size`)")
    yield from dict.fromkeys(told)


def _of_group(group: Mapping[str, object], optimizer: OptimizerState) -> Iterator[str]:
    lr = group.get("lr")
    if group.get("relative_step") is True:
        yield "Adafactor computes its step from the step counter (`relative_step`)"
    elif lr is None:
        yield "the group's `lr` is None: the optimizer computes its step in another way"
    elif isinstance(lr, bool) or not isinstance(lr, int | float):
        yield f"the group's `lr` is stored as {type(lr).__name__}, not as a number"
    if "beta2_decay" in group:  # torch.optim.Adafactor: `rho_t = min(lr, 1 / sqrt(step))`; its `d` is a clipping threshold
        steps = optimizer.steps[1] if optimizer.steps else 0
        if isinstance(lr, int | float) and lr * (steps + 1) ** 0.5 > 1:
            yield f"Adafactor steps by 1 / sqrt(step) where that is below `lr`, as at step {steps}"
        return
    for fields, what in _OTHER_STEPS:
        if fields <= group.keys():
            yield what
            return
    for name, value in group.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _KNOWN_LR_FIELDS and names_lr(name) and is_number and value:
            yield f"the group holds `{name}` {value!r}, an LR of its own that is not scaled"
