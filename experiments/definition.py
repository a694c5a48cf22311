"""The definition of a study (arms, profiles, outcome, contrasts, margin), and how it is read from YAML.

Lengths inside arms are in slices, so that one study fits every profile; `design.py` converts them to updates. A field's type
says what it may hold (`bit_transformer.config`). Every study launches a command: the bit transformer's where it names none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from string import Formatter
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from bit_transformer.config import Amount, Count, Positive, Size, require_fields
from bit_transformer.errors import BadRecipe
from experiments.errors import BadStudy

VERSION = 1
Setting: TypeAlias = str | int | float
FACTORIAL_EFFECTS = ("restart, main effect", "repetition, main effect", "interaction")
UNITS = ((), ("seed",), ("slice",), ("order",), ("checkpoint",), ("checkpoint", "order"))
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,30}")


class Order(StrEnum):
    """The order in which a slice is read after a restart."""

    PLAN = "plan"  # the order that the arm would have without the restart
    RESHUFFLED = "reshuffled"  # another full shuffle of the slice
    STOCK = "stock"  # stock WebDataset: shuffled shard list, samples through an empty buffer; entropy from the seed


class Loss(StrEnum):
    """State that a restart loses on purpose."""

    MOMENTS = "moments"  # Adam's moments and step counts
    SCHEDULE = "schedule"  # the LR schedule starts again at 0, warm-up included (exp9)
    PRECISION = "precision"  # the weights were saved in bfloat16: what float32 has beyond it is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What happens between two launches. `at` is in slices from the start; empty means every slice boundary."""

    at: tuple[Amount, ...] = ()
    order: Order = Order.PLAN
    loses: tuple[Loss, ...] = ()
    ratio: dict[str, Count] = field(default_factory=dict)  # mixture right after the restart …
    ratio_for: Amount = 0.0  # … for so many slices
    back: Amount = 0.0  # rolled back by so many slices
    skip: Amount = 0.0  # and so many slices of data skipped
    set: dict[str, Setting] = field(default_factory=dict)  # of a trainer's settings, from the first restart on
    rollback: tuple[str, ...] = ()  # words of `chronicle rollback --to` the step of the restart, before each restart

    def __post_init__(self) -> None:
        require_fields(self)
        if bool(self.ratio) != bool(self.ratio_for):
            raise BadStudy("`ratio` and `ratio_for` belong together: one of them is missing")
        if (self.back or self.skip) and len(self.at) != 1:
            raise BadStudy("a rollback (`back`, `skip`) needs one position in `at`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A sequence of slices (1 … 4, repeats allowed), read one after the other, or merged and shuffled."""

    name: str
    slices: tuple[Count, ...]
    merged: bool = False
    restart: Restart | None = None
    set: dict[str, Setting] = field(default_factory=dict)  # of a trainer's settings, in every launch
    says: str = ""

    def __post_init__(self) -> None:
        require_fields(self)
        if not NAME.fullmatch(self.name) or not self.slices:
            raise BadStudy(f"arm `{self.name}`: expected letters, digits and `-`, beginning with a letter, and slices")
        if self.merged and self.restart is not None:
            raise BadStudy(f"arm `{self.name}` is merged and restarted: its order after a restart is not defined")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """`plus` minus `minus`, paired by seed. Contrasts of the family `main` share Holm's adjustment.

    The family `control` is an effect that must be there; where it is not seen, the study could not see others either.
    """

    name: str
    plus: str
    minus: str
    family: str = "other"
    question: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    """A question of the study and its contrasts: the first answers it, the others are shown beside."""

    name: str  # the question, in words
    by: tuple[str, ...]
    cannot: str = ""  # what the answer cannot say, written before the first run


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """The program that a study launches, and what differs from launch to launch.

    Words, `checkpoint` and a path in `metrics` hold placeholders, `{last}` or one of `settings` (the list: docs/studies.md).
    `metrics` is `guard` (what the guard or `chronicle.log` recorded), `output` (printed lines) or the path of a log. In text,
    `lines` finds what the usual forms do not: by channel a regular expression with two groups, step and value.
    """

    command: tuple[str, ...]
    resume: tuple[str, ...] = ()  # appended where a launch resumes
    checkpoint: str = "step-{step}"  # the checkpoint after a step, below {checkpoints}
    settings: dict[str, Setting] = field(default_factory=dict)  # with their usual values; arms `set` others
    metrics: str = "guard"
    lines: dict[str, str] = field(default_factory=dict)
    loss: str = "loss"  # channel of the training loss
    outcome: str = "eval_loss"  # channel whose last value is the outcome; lower is better
    also: tuple[str, ...] = ()  # channels whose last values are shown beside it, without a verdict
    reads: tuple[str, ...] = ()  # settings that change which data are read
    unit: str = "nats"  # of the outcome
    stop: Literal["itself", "checkpoint"] = "itself"  # `checkpoint`: TERM when the checkpoint after {last} is complete

    def __post_init__(self) -> None:
        require_fields(self)
        for name in self.settings:
            if name in PLACEHOLDERS or not SETTING.fullmatch(name):
                raise BadStudy(f"setting `{name}` of the trainer is a placeholder of the study's or no plain name")
        if not self.command:
            raise BadStudy("key `command` of the trainer is empty: expected the words of a command")
        for word in (*self.command, *self.resume, self.metrics):
            require_placeholders(word, {*PLACEHOLDERS, *self.settings})
        require_placeholders(self.checkpoint, {"step"})
        _require_known(self.reads, list(self.settings), "key `reads` of the trainer names `{}`, which is no setting:")
        for channel, pattern in self.lines.items():
            if self.metrics == "guard":
                raise BadStudy(f"`{channel}` in `lines` of the trainer needs `metrics: output` or a path")
            try:
                groups = re.compile(pattern).groups
            except re.error as problem:
                raise BadStudy(f"`{channel}` in `lines` of the trainer is no regular expression: {problem}") from None
            if groups != 2:
                raise BadStudy(f"`{channel}` in `lines` of the trainer has {groups} groups, expected step and value")


PLACEHOLDERS = ("arm", "checkpoints", "data", "every", "first", "last", "leg", "order", "plan", "python", "resume", "run",
                "seed", "skipped", "start", "total", "updates")
SETTING = re.compile(r"[a-z][a-z0-9_]{0,30}")


def require_placeholders(word: str, known: set[str]) -> None:
    """Raise `BadStudy` where a word of the trainer's names a placeholder that there is not."""
    try:
        used = {name for _, name, _, _ in Formatter().parse(word) if name is not None}
    except ValueError as problem:
        raise BadStudy(f"the trainer's word {word!r} has a brace alone ({problem}): write `{{{{` for one") from None
    if used - known:
        raise BadStudy(f"unknown placeholder `{{{min(used - known)}}}` in {word!r}: expected one of {', '.join(sorted(known))}")


def _require_known(names: Iterable[str], known: Sequence[str], sentence: str) -> None:
    for name in names:
        if name not in known:
            raise BadStudy(f"{sentence.format(name)} {', '.join(known) or 'none'}")


BIT_TRANSFORMER = Trainer(
    command=("{python}", "-m", "experiments.trainer", "--plan", "{plan}", "--run", "{run}", "--leg", "{leg}"),
    resume=("--resume", "{resume}"), checkpoint="opt_step-{step}", outcome="averaged/mixture",
    unit="bits per byte")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes. Updates are optimizer steps; windows are bytes; `once` names arms run for the first seed only.

    `starts` common checkpoints are crossed with `seeds`. With a `trainer` the sizes of model and windows are its own.
    """

    name: str
    start_updates: Size
    slice_updates: Count
    seeds: Count
    arms: tuple[str, ...]
    once: tuple[str, ...] = ()
    starts: Count = 1
    d_model: Size = 0
    num_heads: Size = 0
    num_layers: Size = 0
    d_ff: Size = 0
    window_bytes: Size = 0
    batch_size: Size = 0
    lr: Positive = 3e-3
    warmup_updates: Size = 20
    decay_slices: Amount = 1.0  # the LR falls to a tenth over the last so many slices
    ema_decay: Amount = 0.99
    shard_samples: Count = 8
    eval_every: Count = 25
    eval_windows: Count = 64  # per source, during the run; the final evaluation takes four times as many
    stock_buffer: Count = 1000
    stock_initial: Count = 100
    sources: dict[str, Count] = field(default_factory=dict)  # instead of the study's, where more text is needed
    set: dict[str, Setting] = field(default_factory=dict)  # of a trainer's settings, in every launch of every arm
    device: Literal["cpu", "auto"] = "cpu"
    mixed_precision: Literal["no", "bf16"] = "no"

    def __post_init__(self) -> None:
        require_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole definition. `sources` are corpora with integer weights, `gate` two arms that must agree bit for bit."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    profiles: tuple[Profile, ...]
    reference: str
    contrasts: tuple[Contrast, ...] = ()
    sources: dict[str, Count] = field(default_factory=dict)
    trainer: Trainer | None = None
    gate: tuple[str, ...] = ()
    factorial: dict[str, str] = field(default_factory=dict)
    margin_bpb: Positive = 0.02
    bounce_margin: Amount = 0.0  # of the mean excess loss after a restart; 0: not registered, numbers without a verdict
    robust: bool = False  # a verdict must be that of the mean and that of the median of the pairwise means (Hodges and Lehmann)
    alpha: Positive = 0.05
    primary: str = "held-out bits per byte, mixture weights, averaged weights, after the last slice"
    answers: tuple[AnswerRule, ...] = ()
    units: tuple[str, ...] = ()  # what is drawn anew for a pair; two kinds are crossed; empty: what the sizes say

    def __post_init__(self) -> None:
        require_fields(self)
        arms = [arm.name for arm in self.arms]
        named = [self.reference, *self.gate, *self.factorial.values()]
        for contrast in self.contrasts:
            named += [contrast.plus, contrast.minus]
        for profile in self.profiles:
            named += [*profile.arms, *profile.once]
        _require_known(named, arms, "unknown arm `{}`: the study has")
        contrasts = [contrast.name for contrast in self.contrasts] + list(FACTORIAL_EFFECTS if self.factorial else ())
        for rule in self.answers:
            _require_known(rule.by, contrasts, "unknown contrast `{}` in answers: the study has")
        if self.units not in UNITS:
            expected = ", ".join(str(list(kinds)) for kinds in UNITS if kinds)
            raise BadStudy(f"key `units` is {list(self.units)}, expected one of {expected}")
        lengths = {len(arm.slices) for arm in self.arms}
        if len(lengths) != 1 or len(set(arms)) != len(arms) or len(self.gate) not in (0, 2):
            raise BadStudy(f"arms {', '.join(arms)} have {sorted(lengths)} slices and a gate of {len(self.gate)}: names must "
                           "differ, all make the same number of updates, and a gate is the reference and its exact restart")
        settings = list(self.trainer.settings) if self.trainer is not None else []
        for profile in self.profiles:
            _require_known(profile.set, settings, f"profile `{profile.name}` sets `{{}}`: the trainer's settings are")
        for arm in self.arms:
            restart = arm.restart or Restart()
            _require_known([*arm.set, *restart.set], settings, f"arm `{arm.name}` sets `{{}}`: the trainer's settings are")
            for word in restart.rollback:
                require_placeholders(word, {*PLACEHOLDERS, *settings})
            if 0 in restart.at and (restart.rollback or restart.back):
                raise BadStudy(f"arm `{arm.name}` rolls back at 0, where it has no checkpoint of its own: name a later `at`")
            if self.trainer is None:
                known = {*self.sources, *(name for profile in self.profiles for name in profile.sources)}
                _require_known(restart.ratio, sorted(known), "unknown source `{}` in a ratio: the study has")
            elif restart.order is Order.STOCK or arm.merged or restart.ratio or Loss.SCHEDULE in restart.loses:
                raise BadStudy(f"arm `{arm.name}` has an order, a mixture or a schedule that only the bit transformer has: a "
                               "`trainer` is told `{order}`, and `set` the option that starts its schedule again")
        if (self.trainer is None) != bool(self.sources):
            raise BadStudy("the study needs `sources` of the bit transformer, or a `trainer`, which reads its own data")

    @property
    def program(self) -> Trainer:
        """What is launched: the study's trainer, else the bit transformer."""
        if self.trainer is not None:
            return self.trainer
        by_source = [f"averaged/{source}" for source in self.sources]
        also = (*by_source, "raw/mixture", "slice/1", f"slice/{len(self.arms[0].slices)}")
        return replace(BIT_TRANSFORMER, also=also)

    @property
    def unit(self) -> str:
        """The unit of the outcome, in words."""
        return self.program.unit

    @property
    def central_arms(self) -> frozenset[str]:
        """The arms of the reference, the gate, the main contrasts and the factorial; all arms without a main contrast."""
        main = [arm for one in self.contrasts if one.family == "main" for arm in (one.plus, one.minus)]
        chosen = (self.reference, *self.gate, *main, *self.factorial.values())
        return frozenset(chosen if main else (arm.name for arm in self.arms))

    def arm(self, name: str) -> Arm:
        """The arm of that name; raises `BadStudy` listing the known ones."""
        by_name = {arm.name: arm for arm in self.arms}
        _require_known([name], list(by_name), "unknown arm `{}`: expected one of")
        return by_name[name]

    def profile(self, name: str) -> Profile:
        """The profile of that name; raises `BadStudy` listing the known ones."""
        by_name = {profile.name: profile for profile in self.profiles}
        _require_known([name], list(by_name), "unknown profile `{}`: expected one of")
        return by_name[name]

    def to_json(self) -> dict[str, Any]:
        """The whole definition as plain values."""
        return {"v": VERSION, **asdict(self)}


# --- Reading a study file

STUDIES_DIR = Path(__file__).parent / "studies"

T = TypeVar("T")


def list_studies() -> tuple[str, ...]:
    """Names of the studies that come with the product."""
    return tuple(sorted(path.stem for path in STUDIES_DIR.glob("*.yaml")))


def find_study(name_or_path: str) -> Study:
    """A study that comes with the product, or a YAML file of the user's own. Raises `BadStudy`."""
    path = Path(name_or_path)
    if name_or_path in list_studies():
        path = STUDIES_DIR / f"{name_or_path}.yaml"
    elif not path.is_file():
        raise BadStudy(f"unknown study `{name_or_path}`: expected a YAML file or one of {', '.join(list_studies())}")
    try:
        return parse_study(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as problem:
        raise BadStudy(f"study file `{path}` cannot be read: {problem}") from problem


def parse_study(text: str, *, where: str = "study") -> Study:
    """Parse YAML; raises `BadStudy` naming file and key."""
    import yaml

    try:
        record = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise BadStudy(f"`{where}` is not YAML: {' '.join(str(problem).split())}") from problem
    if not isinstance(record, dict) or record.pop("v", None) != VERSION:
        raise BadStudy(f"`{where}` is not a study of version {VERSION}", f"begin it with `v: {VERSION}`")
    try:
        return build(Study, record)
    except BadStudy as problem:
        raise BadStudy(f"`{where}`: {problem.message}", problem.remedy) from problem


def build(kind: type[T], record: Mapping[str, Any], *, registered: bool = False) -> T:
    """Build a dataclass from a mapping, and the dataclasses in it, of which a list may be a mapping by name.

    Unknown keys are errors, but in a registered plan: a key of another version decides nothing here.
    """
    where = f"{kind.__name__.lower()} {record.get('name', '')}".rstrip()
    known, hints = {one.name: one for one in fields(kind)}, get_type_hints(kind)  # type: ignore[arg-type]
    values = {}
    for key, value in record.items():
        if key in known:
            values[key] = _shaped(hints[key], value, f"key `{key}` in {where}", registered)
        elif not registered:
            raise BadStudy(f"unknown key `{key}` in {where}: expected {', '.join(known)}")
    for name, one in known.items():
        if name not in values and one.default is MISSING and one.default_factory is MISSING:
            raise BadStudy(f"key `{name}` is missing in {where}")
    try:
        return kind(**values)
    except BadRecipe as problem:
        raise BadStudy(f"{where}: {problem}") from problem


def _shaped(hint: Any, value: Any, where: str, registered: bool) -> Any:
    """A value of a file in the form of its field; what has another form stays, and is refused by the field's type."""
    parts = get_args(hint)
    if get_origin(hint) is UnionType and value is not None:
        hint = parts[0]
    if get_origin(hint) is tuple:
        if is_dataclass(parts[0]) and isinstance(value, Mapping):
            value = [_named(name, body, where) for name, body in value.items()]
        return tuple(_shaped(parts[0], one, where, registered) for one in value) if isinstance(value, list | tuple) else value
    if isinstance(hint, type) and is_dataclass(hint) and value is not None:
        if not isinstance(value, Mapping):
            raise BadStudy(f"{where} is {value!r}: expected a mapping")
        return build(hint, value, registered=registered)
    return hint(value) if isinstance(hint, type) and issubclass(hint, StrEnum) and value in list(hint) else value


def _named(name: str, body: Any, where: str) -> dict[str, Any]:
    """The record of a mapping by name; of an answer its contrasts alone may stand there."""
    if isinstance(body, list):
        body = {"by": body}
    if not isinstance(body, Mapping):
        raise BadStudy(f"{where}: the value of `{name}` is {body!r}, expected a mapping")
    return {"name": str(name), **body}
