"""The definition of a study (arms, profiles, outcome, contrasts, margin), and how it is read from YAML.

Every study launches a command, its trainer, and treats launches: another value of a setting, or another order of the data.
Lengths inside arms are in slices, so that one study fits every profile; `design.py` converts them to updates. A field's type
says what it may hold (`bit_transformer.config`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from string import Formatter
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from bit_transformer.config import Amount, Count, Positive, Size, require_fields
from bit_transformer.errors import BadRecipe
from experiments.errors import BadStudy

VERSION = 1
Setting: TypeAlias = str | int | float
CELLS = ("fresh-continuous", "fresh-restarted", "repeated-continuous", "repeated-restarted")
EFFECTS = {  # of a factorial: in words, and the weights of its cells
    "restart, main effect": ("half of (fresh + repeated)", (-0.5, 0.5, -0.5, 0.5)),
    "repetition, main effect": ("half of (continuous + restarted)", (-0.5, -0.5, 0.5, 0.5)),
    "interaction": ("restart on repeated − restart on fresh", (1, -1, -1, 1)),
}
UNITS = ((), ("seed",), ("slice",), ("order",), ("checkpoint",), ("checkpoint", "order"))
NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,30}")
SETTING = re.compile(r"[a-z][a-z0-9_]{0,30}")
PLACEHOLDERS = ("begin", "checkpoints", "data", "first", "last", "order", "python", "resume", "seed", "total", "updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What happens between two launches. `at` is in slices from the start; empty means every slice boundary."""

    at: tuple[Amount, ...] = ()
    reshuffle: bool = False  # what a launch reads has another order after each restart
    set: dict[str, Setting] = field(default_factory=dict)  # of the trainer's settings, from the first restart on


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A sequence of slices (1 … 4, repeats allowed), read one after the other."""

    name: str
    slices: tuple[Count, ...]
    restart: Restart | None = None
    set: dict[str, Setting] = field(default_factory=dict)  # of the trainer's settings, in every launch
    says: str = ""


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
    unit: str = "nats"  # of the outcome and of the loss
    stop: Literal["itself", "checkpoint"] = "itself"  # `checkpoint`: TERM when the checkpoint after {last} is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes, in updates; `once` names arms run for the first seed of every common checkpoint only.

    `starts` common checkpoints are crossed with `seeds`.
    """

    name: str
    start_updates: Size
    slice_updates: Count
    seeds: Count
    arms: tuple[str, ...]
    once: tuple[str, ...] = ()
    starts: Count = 1
    set: dict[str, Setting] = field(default_factory=dict)  # of the trainer's settings, in every launch of every arm


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole definition. `gate` names two arms that must agree bit for bit: the reference and its exact restart."""

    name: str
    title: str
    trainer: Trainer
    arms: tuple[Arm, ...]
    profiles: tuple[Profile, ...]
    reference: str
    contrasts: tuple[Contrast, ...] = ()
    gate: tuple[str, ...] = ()
    factorial: dict[str, str] = field(default_factory=dict)
    margin_bpb: Positive = 0.02
    bounce_margin: Amount = 0.0  # of the bounce after a restart; 0: not registered, numbers without a verdict
    robust: bool = False  # a verdict must be that of the mean and that of the median of the pairwise means (Hodges and Lehmann)
    alpha: Positive = 0.05
    primary: str = "held-out bits per byte, mixture weights, averaged weights, after the last slice"
    answers: tuple[AnswerRule, ...] = ()
    units: tuple[str, ...] = ()  # what is drawn anew for a pair; two kinds are crossed; empty: what the sizes say

    @property
    def unit(self) -> str:
        """The unit of the outcome, in words."""
        return self.trainer.unit

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

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
        study = build(Study, record)
        _check_study(study)
    except BadStudy as problem:
        raise BadStudy(f"`{where}`: {problem.message}", problem.remedy) from problem
    return study


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
        made = kind(**values)
        require_fields(made)
    except BadRecipe as problem:
        raise BadStudy(f"{where}: {problem}") from problem
    return made


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
    return value


def _named(name: str, body: Any, where: str) -> dict[str, Any]:
    """The record of a mapping by name; of an answer its contrasts alone may stand there."""
    if isinstance(body, list):
        body = {"by": body}
    if not isinstance(body, Mapping):
        raise BadStudy(f"{where}: the value of `{name}` is {body!r}, expected a mapping")
    return {"name": str(name), **body}


# --- What its types do not say


def _check_study(study: Study) -> None:
    _check_trainer(study.trainer)
    arms = [arm.name for arm in study.arms]
    named = [study.reference, *study.gate, *study.factorial.values()]
    for contrast in study.contrasts:
        named += [contrast.plus, contrast.minus]
    for profile in study.profiles:
        named += [*profile.arms, *profile.once]
    _require_known(named, arms, "unknown arm `{}`: the study has")
    contrasts = [contrast.name for contrast in study.contrasts] + list(EFFECTS if study.factorial else ())
    for rule in study.answers:
        _require_known(rule.by, contrasts, "unknown contrast `{}` in answers: the study has")
    if study.units not in UNITS:
        expected = ", ".join(str(list(kinds)) for kinds in UNITS if kinds)
        raise BadStudy(f"key `units` is {list(study.units)}, expected one of {expected}")
    lengths = {len(arm.slices) for arm in study.arms}
    if len(lengths) != 1 or 0 in lengths or len(set(arms)) != len(arms) or len(study.gate) not in (0, 2):
        raise BadStudy(f"arms {', '.join(arms)} have {sorted(lengths)} slices and a gate of {len(study.gate)}: names must "
                       "differ, all make the same number of updates, and a gate is the reference and its exact restart")
    settings = list(study.trainer.settings)
    for profile in study.profiles:
        _require_known(profile.set, settings, f"profile `{profile.name}` sets `{{}}`: the trainer's settings are")
    for arm in study.arms:
        if not NAME.fullmatch(arm.name):
            raise BadStudy(f"arm `{arm.name}`: expected letters, digits and `-`, beginning with a letter")
        own = [*arm.set, *(arm.restart.set if arm.restart is not None else ())]
        _require_known(own, settings, f"arm `{arm.name}` sets `{{}}`: the trainer's settings are")


def _check_trainer(trainer: Trainer) -> None:
    for name in trainer.settings:
        if name in PLACEHOLDERS or not SETTING.fullmatch(name):
            raise BadStudy(f"setting `{name}` of the trainer is a placeholder of the study's or no plain name")
    if not trainer.command:
        raise BadStudy("key `command` of the trainer is empty: expected the words of a command")
    for word in (*trainer.command, *trainer.resume, trainer.metrics):
        _require_placeholders(word, {*PLACEHOLDERS, *trainer.settings})
    _require_placeholders(trainer.checkpoint, {"step"})
    for channel, pattern in trainer.lines.items():
        try:
            groups = re.compile(pattern).groups
        except re.error as problem:
            raise BadStudy(f"`{channel}` in `lines` of the trainer is no regular expression: {problem}") from None
        if groups != 2:
            raise BadStudy(f"`{channel}` in `lines` of the trainer has {groups} groups, expected step and value")


def _require_placeholders(word: str, known: set[str]) -> None:
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
