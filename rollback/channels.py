"""The table of channel names: the role of a logged series (loss, LR, gradient norm, …), found by its name.

A channel is one logged series (`loss`, `lr`, `grad_norm`). Log readers, the detector, `status`, the report and the
restart checks all ask this module. Another literal list of channel names is an error of `scripts/channel_names.py`,
which `make lint` runs.

    role_of("lm loss")                  Role.LOSS
    find_channel(values, Role.LOSS)     the name under which these values hold the training loss, or None
    value_of(values, Role.LR)           the value itself, or None
    canonical_name("learning_rate")     "lr": the name under which the readers of foreign logs hand it out
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class Role(StrEnum):
    """LOSS decides; SOURCE is a part of it (a data source, a term); NORM, OTHER, SPEED and LOSS_SCALE never propose alone.

    OBJECTIVE is what does not fall by nature (a policy's or a GAN's loss), REWARD what should rise. SKIPPED counts steps
    that the optimizer left out.
    """

    LOSS = "loss"
    SOURCE = "source"
    OBJECTIVE = "objective"
    REWARD = "reward"
    SKIPPED = "skipped"
    NORM = "norm"
    OTHER = "other"
    SPEED = "speed"
    LR = "lr"
    LR_EXPECTED = "lr-expected"
    LOSS_SCALE = "loss-scale"
    WEIGHT = "weight"
    IGNORED = "ignored"


class LossKind(StrEnum):
    """How the loss of a run behaves: it falls, it is a reward, or two networks play against each other."""

    LOSS = "loss"
    REWARD = "reward"
    ADVERSARIAL = "adversarial"


NEVER = r"(?!)"  # matches nothing


class RoleNames(NamedTuple):
    """The names of one role, in lower case.

    `canonical` is the name that we write; readers of foreign logs rename `aliases` to it. Names that match `pattern`
    have the role and keep their name. `parts` matches series of one part (a parameter group, a layer): the same role,
    shown only where nothing else has it.
    """

    role: Role
    canonical: str | None = None
    aliases: tuple[str, ...] = ()
    pattern: str = NEVER
    parts: str = NEVER


EVAL_WORDS = r"val|valid|validation|eval|evaluation|test"  # a loss whose name begins so is measured on held-out data
EVAL = rf"(.*[^a-z])?({EVAL_WORDS}|dev|best|ema|hella|ppl|perplexity)([^a-z].*)?"
COUNTS = r"(.*[/_. ])?(num|count|cnt|n)([/_. ].*)?|.*[/_. ](weights?|coeff?|factor|lambda|type|fn)"  # and settings: no losses
EXPECTED_LR = "lr/expected"  # the LR that a rollback promised, beside the one that was logged
TRAIN = r"(?:train(?:ing|er)?[/_. ])?"
LOSS_WORDS = r"loss|losses|nll|xent|cross[-_ ]?entropy|logloss|mlogloss"

# The first row that knows a name decides. `_words` has split the name: `LossPi` is `loss_pi`.
TABLE: tuple[RoleNames, ...] = (
    RoleNames(role=Role.LR_EXPECTED, canonical=EXPECTED_LR),
    RoleNames(
        role=Role.LOSS, canonical="loss",
        aliases=("per_token_loss", "lm_loss", "train_loss", "training_loss", "trl"),
        pattern=rf"{TRAIN}(loss_metrics/)?(lm[ _]|global[_ ]?avg[_ ]?|total[_ ]|tot[_ ]|avg[_ ]|avr[_ ]|mean[_ ]|"
        r"running[_ ]|"
        r"train[_ ]|step[_ ]|iter[_ ]|"
        r"batch[_ ]|model[_ ]|reduced[_ ]train[_ ]|ce[_ ]|cross[_ ]?entropy[_ ]|lm[_ ]head[_ ])?loss"
        r"([_ ](step|epoch|avg|mean|train))?"
        rf"|{TRAIN}(loss|losses)([_/ .](train|total))+|{TRAIN}loss/total_loss"
        r"|learn|(?:train(?:ing)?[-/_. ])?(cost|xent|logloss|mlogloss|(?:binary|multi)_logloss)",
    ),
    RoleNames(role=Role.OTHER, canonical="z_loss", aliases=("z-loss",), pattern=r"(.*[/_. ])?z[_ -]?loss"),
    RoleNames(role=Role.LOSS_SCALE, canonical="loss_scale", pattern=r"(.*[/_. ])?((loss|grad)[_ /]?scale|scaler?/scale)"),
    RoleNames(
        role=Role.OBJECTIVE,
        pattern=r"(.*[/_. ])?(pg|ppo|grpo|policy|policy[_ ]gradient|actor|critic|value|value[_ ]function|vf|baseline|"
        r"entropy|q|qf|"
        r"qf?\d|alpha|temperature|surrogate|reinforce|gen|generator|dis|disc|discriminator|(net_?)?[dg](_?[ab])?|[dg]_?net|real|"
        r"fake|adv|adversarial|gan|err_?[dg])[_ /.]?(loss|losses)([_/. ].*)?|"
        r"(.*[/_. ])?loss(es)?[_ /.](pi|v|q|vf|actor|critic|policy|value|entropy|(net_?)?[dg](_?[ab])?|gen|generator|dis|disc|"
        r"discriminator|adv|gan)([_/. ].*)?|err_?[dg]([_/. ](real|fake))?|"
        r"(.*[/_. ])?([dg]_(real|fake|gan|l1|[ab])|(cycle|idt)_[ab])",  # as pix2pix and CycleGAN print
    ),
    RoleNames(
        role=Role.REWARD,
        pattern=r"(?!(.*[/_. ])?std[/_. ])(?:(.*[/_. ])?(ep(isode)?[_ ]?)?(rew|reward|rewards|return|returns|ret)([_/. ]"
        r"(mean|avg|average|total|sum))?"
        r"|(.*[/_. ])?(mean|avg|average|ave)[_ ](ep(isode)?[_ ]?)?(rew|reward|return|ret|score)"
        r"|(.*[/_. ])?(rew|reward|score)s?/mean)",
    ),
    RoleNames(
        role=Role.SOURCE, pattern=rf"(?!{EVAL}$)(.*[^a-z])?({LOSS_WORDS})([^a-z].*)?"
        r"|l_(g_)?(pix|pixel|percep|perceptual|style|fea|feat|tv|rec|recon|l1|l2|mse|ssim|total)",  # as BasicSR prints
    ),
    RoleNames(
        role=Role.NORM, canonical="grad_norm", aliases=("gradient_norm", "norm", "gnorm", "g_norm", "grad"),
        pattern=r"(.*[/_. ])?(total[_ ]|global[_ ]|l2[_ ])?"
        r"(grad|gradient)s?[_ ]?(global[_ ])?(norm|l2)(/total|[_ ](avg|mean|total))?|gnorm",
        parts=r"(train/)?(grad|update|param)[_ ]norm([/.][\w.-]+)?",
    ),
    RoleNames(
        role=Role.LR, canonical="lr", aliases=("learning_rate", "l.r."),
        pattern=r"(train/|trainer/|optim/|optimizer/|optimization/)?(lr|learning[_ ]rate|base[_ ]lr|train[_ ]lr)",
        parts=r"(?!.*(scale|mult|factor|decay|warm))(.*[/_. ])?(lr|learning[_ ]rate)([-/_. ].*|\d*)?",
    ),
    RoleNames(
        role=Role.SKIPPED, pattern=r"(.*[/_. ])?(num(ber)?[_ ](of[_ ])?)?(skipped|nan|overflow|non[_ ]finite)[_ ]?"
        r"(iterations|iters|steps|updates|batches|count)?",
    ),
    RoleNames(role=Role.WEIGHT, pattern=r"(weight|mix|ratio|share)s?/[\w.-]+"),
    RoleNames(
        role=Role.SPEED, canonical="tokens_per_second", aliases=("tok/sec", "tps"),
        pattern=r"(.*/)?(tokens|samples)[_ ]?(per|/)[_ ]?s(ec(ond)?)?([_ ]per[_ ]gpu)?|tok/s|throughput",
    ),
)  # fmt: skip

# Columns and fields that place a point; the trainer's own step first, because W&B's `_step` counts log calls.
STEP_NAMES = (
    "train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "_step", "train/step", "steps",
    "iterations", "train_step", "training_step", "num_updates", "update", "current_steps",
    "opt_step", "optimizer_step", "batch",
    "time/total_timesteps", "total_timesteps", "misc/total_timesteps", "timesteps_total", "num_env_steps_sampled", "timesteps",
    "totalenvinteracts", "num_timesteps", "env_steps", "total_steps", "training_iteration",
    "progress/tick", "epoch",
)  # fmt: skip
EPOCH_NAMES = ("epoch", "ep", "train/epoch", "trainer/epoch")
TIME_NAMES = ("t", "time", "wall_time", "_timestamp", "timestamp", "wall time", "created_at")
LAUNCH_NAMES = ("launch", "event_file", "session", "segment")

JUDGED = (Role.LOSS, Role.OBJECTIVE, Role.SOURCE, Role.REWARD)  # without one of these a log cannot be watched
TELLING = (*JUDGED, Role.NORM, Role.LR)  # a printed line that holds one of these is a logged step
HINTS = (  # a printed line without any of these holds none of them
    "loss", "Loss", "LOSS", "trl", "lr", "LR", "norm", "Norm", "grad", "Grad",
    "rew", "Rew", "Cost", "cost:", "learn:", "xent", "ntropy",
    "L.r.", "eturn", "D_", "G_",
)  # fmt: skip
HEALTH_WORDS = ("grad", "norm", "z_loss", "loss_scale", "update", "adam", "variance", "clip")


# The usual names need none of the patterns, which take a tenth of the start of `status` to compile.
EXACT = {name: row.role for row in reversed(TABLE) for name in (row.canonical, *row.aliases) if name}


@lru_cache(maxsize=4096)
def role_of(name: str) -> Role:
    """Return the role of a channel by its name; what is not recognised is IGNORED and not scanned."""
    return EXACT[name] if name in EXACT else _role_by_pattern(name)


def _role_by_pattern(name: str) -> Role:
    words = _words(name)
    row = _row_of(words)
    if row is None:
        return Role.IGNORED
    if row.role in JUDGED and (re.fullmatch(EVAL, words) or re.fullmatch(COUNTS, words)):
        return Role.IGNORED
    return row.role


def totality_of(name: str) -> tuple[int, int]:
    """Order several losses of one run: the total first, then a step's, then what is averaged over more, a sub-folder's last."""
    words = _words(name)
    averaged = any(word in words for word in ("epoch", "avg", "mean", "smooth"))
    total = 0 if "total" in words or "tot_" in words else 1
    return (2 if averaged else total, words.count("/"))


@lru_cache(maxsize=4096)
def canonical_name(name: str) -> str:
    """Return the name that we use for what a trainer calls so: `lm loss` and `train_loss` are `loss`."""
    lowered = name.lower().replace(" ", "_")
    known = CANONICAL.get(lowered, lowered)
    return known if known in CANONICAL_OF.values() else name


def canonical_of(role: Role) -> str:
    """Return the name that we write for a role; raises KeyError for a role that names many series."""
    return CANONICAL_OF[role]


def find_channel(names: Iterable[str], role: Role) -> str | None:
    """Return the first of these names that has the role, one of a part only where there is no other.

    Of several losses the total leads (`totality_of`), else the first one logged, in the detector as in every view. A run
    without a loss has a part of it, an objective or a reward in its place.
    """
    names = list(names)
    whole = [name for name in names if role_of(name) is role]
    if role is Role.LOSS:
        for stand_in in JUDGED:
            if whole := [name for name in names if role_of(name) is stand_in]:
                return min(whole, key=totality_of)
        return None
    return next((name for name in whole if not _is_part(name)), whole[0] if whole else None)


def value_of(values: Mapping[str, float], role: Role) -> float | None:
    """Return the value of the channel that `find_channel` names, or None."""
    name = find_channel(values, role)
    return None if name is None else values[name]


def is_health(name: str) -> bool:
    """Whether a channel measures the optimizer (gradients, norms, clipping, moments) rather than the result."""
    return any(word in name.lower() for word in HEALTH_WORDS)


def is_held_out(name: str) -> bool:
    """Whether a channel is a loss on data that is not trained on: `eval/loss`, `val_loss`."""
    words = _words(name)
    return re.fullmatch(EVAL, words) is not None and re.search(LOSS_WORDS, words) is not None


def printed_names() -> str:
    """Return a regular expression for the names that trainers print, a loss of one data source among them."""
    names = {name for row in TABLE if row.role is not Role.LR_EXPECTED for name in (row.canonical, *row.aliases) if name}
    names |= {"reward", "total_loss", "cost"}
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return "|".join([*(re.escape(name).replace("_", "[ _]") for name in longest_first), r"loss[/.][\w-]+"])


def _row_of(lowered: str) -> RoleNames | None:
    plain = lowered.replace(" ", "_")
    for row in TABLE:
        if plain == row.canonical or plain in row.aliases:
            return row
        if re.fullmatch(row.pattern, lowered) or re.fullmatch(row.parts, lowered):
            return row
    return None


def _is_part(name: str) -> bool:
    if name in EXACT:
        return False
    lowered = _words(name)
    row = _row_of(lowered)
    return row is not None and re.fullmatch(row.parts, lowered) is not None and re.fullmatch(row.pattern, lowered) is None


def _words(name: str) -> str:
    """Return a name in lower case with its words apart: `CrossEntropyLoss` is `cross_entropy_loss`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z]$)", "_", name).lower()


CANONICAL_OF: Mapping[Role, str] = {row.role: row.canonical for row in TABLE if row.canonical}
CANONICAL: Mapping[str, str] = {alias: row.canonical for row in TABLE if row.canonical for alias in row.aliases}
