"""The definition of a study (arms, profiles, outcome, contrasts, margin), and how it is read from YAML.

Lengths inside arms are in slices, so that one study fits every profile; `design.py` converts them to updates. Unknown,
missing and malformed keys are errors that name the key's place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Any, TypeAlias, TypeVar

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

    at: tuple[float, ...] = ()
    order: Order = Order.PLAN
    loses: tuple[Loss, ...] = ()
    ratio: Mapping[str, int] = field(default_factory=dict)  # mixture right after the restart …
    ratio_for: float = 0.0  # … for so many slices
    back: float = 0.0  # rolled back by so many slices
    skip: float = 0.0  # and so many slices of data skipped
    set: Mapping[str, Setting] = field(default_factory=dict)  # of a trainer's settings, from the first restart on
    rollback: tuple[str, ...] = ()  # words of `chronicle rollback --to` the step of the restart, before each restart

    def __post_init__(self) -> None:
        if min(self.ratio_for, self.back, self.skip, *self.at, 0.0) < 0:
            raise BadStudy(f"a restart has a negative length: {self}")
        if bool(self.ratio) != bool(self.ratio_for):
            raise BadStudy("`ratio` and `ratio_for` belong together: one of them is missing")
        if (self.back or self.skip) and len(self.at) != 1:
            raise BadStudy("a rollback (`back`, `skip`) needs one position in `at`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A sequence of slices (1 … 4, repeats allowed), read one after the other, or merged and shuffled."""

    name: str
    slices: tuple[int, ...]
    merged: bool = False
    restart: Restart | None = None
    set: Mapping[str, Setting] = field(default_factory=dict)  # of a trainer's settings, in every launch
    says: str = ""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise BadStudy(f"arm `{self.name}`: expected letters, digits and `-`, beginning with a letter")
        if not self.slices or min(self.slices) < 1:
            raise BadStudy(f"arm `{self.name}` has slices {list(self.slices)}, expected numbers from 1")
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
    """A program that trains instead of the bit transformer, and what differs from launch to launch.

    Words, `checkpoint` and a path in `metrics` hold placeholders, `{last}` or one of `settings` (the list: docs/studies.md).
    `metrics` is `guard` (what the guard or `chronicle.log` recorded), `output` (printed lines) or the path of a log. In text,
    `lines` finds what the usual forms do not: by channel a regular expression with two groups, step and value.
    """

    command: tuple[str, ...]
    resume: tuple[str, ...] = ()  # appended where a launch resumes
    checkpoint: str = "step-{step}"  # the checkpoint after a step, below {checkpoints}
    settings: Mapping[str, Setting] = field(default_factory=dict)  # with their usual values; arms `set` others
    metrics: str = "guard"
    lines: Mapping[str, str] = field(default_factory=dict)
    loss: str = "loss"  # channel of the training loss
    outcome: str = "eval_loss"  # channel whose last value is the outcome; lower is better
    also: tuple[str, ...] = ()  # channels whose last values are shown beside it, without a verdict
    probe: tuple[str, ...] = ()  # two channels: without and with examples; their difference is what examples gain
    reads: tuple[str, ...] = ()  # settings that change which data are read
    unit: str = "nats"  # of the outcome
    stop: str = "itself"  # `checkpoint`: the launch gets TERM when the checkpoint after {last} is complete

    def __post_init__(self) -> None:
        for name in self.settings:
            if name in PLACEHOLDERS or not SETTING.fullmatch(name):
                raise BadStudy(f"setting `{name}` of the trainer is a placeholder of the study's or no plain name")
        if not self.command:
            raise BadStudy("key `command` of the trainer is empty: expected the words of a command")
        for word in (*self.command, *self.resume, self.metrics):
            _check_placeholders(word, {*PLACEHOLDERS, *self.settings})
        _check_placeholders(self.checkpoint, {"step"})
        for channel, pattern in self.lines.items():
            self._check_pattern(f"`{channel}` in `lines` of the trainer", pattern)
        for name in self.reads:
            if name not in self.settings:
                raise BadStudy(f"key `reads` of the trainer names `{name}`, which is no setting")
        if len(self.probe) not in (0, 2):
            raise BadStudy(f"key `probe` of the trainer names {len(self.probe)} channels, expected two: without, with examples")
        if self.stop not in ("itself", "checkpoint"):
            raise BadStudy(f"key `stop` of the trainer is {self.stop!r}: expected `itself` or `checkpoint`")

    def _check_pattern(self, where: str, pattern: str) -> None:
        try:
            groups = re.compile(pattern).groups
        except re.error as problem:
            raise BadStudy(f"{where} is no regular expression: {problem}") from None
        if groups != 2:
            raise BadStudy(f"{where} has {groups} groups, expected step and value")
        if self.metrics == "guard":
            raise BadStudy(f"{where} needs `metrics: output` or a path")


PLACEHOLDERS = ("arm", "checkpoints", "data", "every", "first", "last", "leg", "order", "python", "resume", "run", "seed",
                "start", "total", "updates")
SETTING = re.compile(r"[a-z][a-z0-9_]{0,30}")


def _check_placeholders(word: str, known: set[str]) -> None:
    try:
        used = {name for _, name, _, _ in Formatter().parse(word) if name is not None}
    except ValueError as problem:
        raise BadStudy(f"the trainer's word {word!r} has a brace alone ({problem}): write `{{{{` for one") from None
    if used - known:
        raise BadStudy(f"unknown placeholder `{{{min(used - known)}}}` in {word!r}: expected one of {', '.join(sorted(known))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Sizes. Updates are optimizer steps; windows are bytes; `once` names arms run for the first seed only.

    `starts` common checkpoints are crossed with `seeds`. With a `trainer` the sizes of model and windows are its own.
    """

    name: str
    start_updates: int
    slice_updates: int
    seeds: int
    arms: tuple[str, ...]
    once: tuple[str, ...] = ()
    starts: int = 1
    d_model: int = 0
    num_heads: int = 0
    num_layers: int = 0
    d_ff: int = 0
    window_bytes: int = 0
    batch_size: int = 0
    lr: float = 3e-3
    warmup_updates: int = 20
    decay_slices: float = 1.0  # the LR falls to a tenth over the last so many slices
    ema_decay: float = 0.99
    shard_samples: int = 8
    eval_every: int = 25
    eval_windows: int = 64  # per source, during the run; the final evaluation takes four times as many
    stock_buffer: int = 1000
    stock_initial: int = 100
    sources: Mapping[str, int] = field(default_factory=dict)  # instead of the study's, where more text is needed
    set: Mapping[str, Setting] = field(default_factory=dict)  # of a trainer's settings, in every launch of every arm
    device: str = "cpu"
    mixed_precision: str = "no"

    def __post_init__(self) -> None:
        if self.start_updates < 0:
            raise BadStudy(f"profile `{self.name}`: start_updates is {self.start_updates}, expected 0 or more")
        for key in ("slice_updates", "seeds", "starts", "shard_samples", "eval_every", "eval_windows"):
            if getattr(self, key) < 1:
                raise BadStudy(f"profile `{self.name}`: {key} is {getattr(self, key)}, expected 1 or more")

    def require_model(self) -> None:
        """Raise `BadStudy` where the sizes that the bit transformer needs are not there."""
        for key in ("d_model", "num_heads", "num_layers", "d_ff", "window_bytes", "batch_size"):
            value = getattr(self, key)
            if not value:
                raise BadStudy(f"key `{key}` is missing in profile {self.name}")
            if value < 1:
                raise BadStudy(f"profile `{self.name}`: {key} is {value}, expected 1 or more")
        if self.d_model % self.num_heads:
            raise BadStudy(f"profile `{self.name}`: d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole definition. `sources` are corpora with integer weights, `gate` two arms that must agree bit for bit."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    contrasts: tuple[Contrast, ...]
    profiles: tuple[Profile, ...]
    reference: str
    sources: Mapping[str, int] = field(default_factory=dict)
    trainer: Trainer | None = None
    gate: tuple[str, ...] = ()
    factorial: Mapping[str, str] = field(default_factory=dict)
    margin_bpb: float = 0.02
    bounce_margin: float = 0.0  # of the mean excess loss after a restart; 0: not registered, numbers without a verdict
    robust: bool = False  # a verdict must be that of the mean and that of the median of the pairwise means (Hodges and Lehmann)
    alpha: float = 0.05
    primary: str = "held-out bits per byte, mixture weights, averaged weights, after the last slice"
    answers: tuple[AnswerRule, ...] = ()
    units: tuple[str, ...] = ()  # what is drawn anew for a pair; two kinds are crossed; empty: what the sizes say

    def __post_init__(self) -> None:
        arms = [arm.name for arm in self.arms]
        if len(set(arms)) != len(arms):
            raise BadStudy(f"arms have the same name: {', '.join(sorted(arms))}")
        named = [self.reference, *self.gate, *self.factorial.values()]
        for contrast in self.contrasts:
            named += [contrast.plus, contrast.minus]
        for profile in self.profiles:
            named += [*profile.arms, *profile.once]
        _require_known(named, arms, "unknown arm `{}`: the study has")
        contrasts = [contrast.name for contrast in self.contrasts] + list(FACTORIAL_EFFECTS if self.factorial else ())
        for rule in self.answers:
            _require_known(rule.by, contrasts, "unknown contrast `{}` in answers: the study has")
        if self.bounce_margin < 0:
            raise BadStudy(f"bounce_margin is {self.bounce_margin}, expected 0 or more")
        if self.margin_bpb <= 0 or not 0 < self.alpha < 1:
            raise BadStudy(f"margin_bpb is {self.margin_bpb}, alpha {self.alpha}: expected above 0 (alpha below 1)")
        if len(self.gate) not in (0, 2):
            raise BadStudy(f"gate names {len(self.gate)} arms, expected two: the reference and its exact restart")
        if self.units not in UNITS:
            expected = ", ".join(str(list(kinds)) for kinds in UNITS if kinds)
            raise BadStudy(f"key `units` is {list(self.units)}, expected one of {expected}")
        lengths = {len(arm.slices) for arm in self.arms}
        if len(lengths) != 1:
            raise BadStudy(f"arms have {sorted(lengths)} slices: all must make the same number of updates")
        if self.trainer is None:
            self._require_own_trainer()
        else:
            self._require_settings(list(self.trainer.settings))

    def _require_own_trainer(self) -> None:
        if not self.sources:
            raise BadStudy("the study names no source: key `sources` is missing")
        sources = list(self.sources)
        for profile in self.profiles:
            profile.require_model()
            sources += profile.sources
        for arm in self.arms:
            restart = arm.restart or Restart()
            _require_known(restart.ratio, sources, "unknown source `{}` in a ratio: the study has")
            if arm.set or restart.set or restart.rollback:
                raise BadStudy(f"arm `{arm.name}` has `set` or `rollback`, which need a `trainer`")
            if 0 in restart.at:
                raise BadStudy(f"arm `{arm.name}` restarts at 0, the common checkpoint, which needs a `trainer`")

    def _require_settings(self, settings: Sequence[str]) -> None:
        """What the study cannot do to a program of which it knows only the command."""
        if self.sources or any(profile.sources for profile in self.profiles):
            raise BadStudy("`sources` belong to the bit transformer: this study has a `trainer`, which reads its own data")
        for profile in self.profiles:
            _require_known(profile.set, settings, f"profile `{profile.name}` sets `{{}}`: the trainer's settings are")
        for arm in self.arms:
            restart = arm.restart or Restart()
            if 0 in restart.at and (restart.rollback or restart.back):
                raise BadStudy(f"arm `{arm.name}` rolls back at 0, where it has no checkpoint of its own: name a later `at`")
            _require_known([*arm.set, *restart.set], settings, f"arm `{arm.name}` sets `{{}}`: the trainer's settings are")
            if restart.order is Order.STOCK or arm.merged:
                raise BadStudy(f"arm `{arm.name}` has an order that only the bit transformer's data have: a `trainer` is told "
                               "`{order}`, 0 for the plan's and another number after a restart with `order: reshuffled`")
            if Loss.SCHEDULE in restart.loses:
                raise BadStudy(f"arm `{arm.name}` loses the schedule: with a `trainer`, `set` the option that starts it again")

    @property
    def unit(self) -> str:
        """The unit of the outcome, in words."""
        return "bits per byte" if self.trainer is None else self.trainer.unit

    @property
    def digest(self) -> str:
        """Hex sha256 over the canonical form, which is registered before the first launch."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

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
        """The whole definition as plain values. What came later is left out where it is not used: hashes of studies stay."""
        parts: dict[str, Any] = {"v": VERSION, **_without_unused(asdict(self))}
        return parts


CAME_LATER = {"also", "bounce_margin", "cannot", "probe", "reads", "robust", "rollback", "set", "starts", "trainer", "units"}
OF_FIELDS = {"answers", "arms", "profiles", "restart", "trainer"}  # whose values are records; other mappings are the user's


def _without_unused(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in record.items():
        if key in CAME_LATER and (not value or (key == "starts" and value == 1)):
            continue
        if key in OF_FIELDS and isinstance(value, Mapping):
            value = _without_unused(value)
        elif key in OF_FIELDS and value:
            value = [_without_unused(one) if isinstance(one, Mapping) else one for one in value]
        found[key] = value
    return found


def _require_known(names: Iterable[str], known: Sequence[str], sentence: str) -> None:
    for name in names:
        if name not in known:
            raise BadStudy(f"{sentence.format(name)} {', '.join(known) or 'none'}")


# --- Reading a study file

STUDIES_DIR = Path(__file__).parent / "studies"

T = TypeVar("T")


def list_studies() -> tuple[str, ...]:
    """Names of the studies that come with the product."""
    return tuple(sorted(path.stem for path in STUDIES_DIR.glob("*.yaml")))


def find_study(name_or_path: str) -> Study:
    """A study that comes with the product, or a YAML file of the user's own. Raises `BadStudy`."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        if name_or_path not in list_studies():
            known = ", ".join(list_studies())
            raise BadStudy(f"unknown study `{name_or_path}`: expected a YAML file or one of {known}")
        path = STUDIES_DIR / f"{name_or_path}.yaml"
    elif not path.is_file():
        raise BadStudy(f"study file `{path}` does not exist")
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
    return study_from_json(record, where=where)


def study_from_json(record: Mapping[str, Any], *, where: str = "study") -> Study:
    """Build a study from `Study.to_json` or from a parsed file, in which named lists may be mappings by name."""
    parts = {key: value for key, value in record.items() if key != "v"}
    try:
        arms = [dict(item) for item in _listed(parts.get("arms"), "arms")]
        for arm in arms:
            if arm.get("restart") is not None:
                arm["restart"] = _restart(arm["name"], arm["restart"])
        parts["arms"] = tuple(_build(Arm, arm) for arm in arms)
        parts["profiles"] = tuple(_build(Profile, item) for item in _listed(parts.get("profiles"), "profiles"))
        parts["contrasts"] = tuple(_build(Contrast, item) for item in _listed(parts.get("contrasts", ()), "contrasts"))
        answers = parts.get("answers", ())
        if isinstance(answers, Mapping):
            answers = {name: by if isinstance(by, Mapping) else {"by": by} for name, by in answers.items()}
        parts["answers"] = tuple(_build(AnswerRule, item) for item in _listed(answers, "answers"))
        trainer = parts.pop("trainer", None)
        if trainer is not None:
            parts["trainer"] = _build(Trainer, _mapping(trainer, "key `trainer`", "a mapping with `command`"), "the trainer")
        return _build(Study, parts)
    except BadStudy as problem:
        raise BadStudy(f"`{where}`: {problem.message}", problem.remedy) from problem


def _mapping(value: Any, what: str, expected: str = "a mapping") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadStudy(f"{what} is {value!r}: expected {expected}")
    return value


def _listed(value: Any, key: str) -> list[Mapping[str, Any]]:
    """The records of a list, or of a mapping by name."""
    if isinstance(value, Mapping):
        found: list[Mapping[str, Any]] = []
        for name, body in value.items():
            if not isinstance(body, Mapping):
                raise BadStudy(f"key `{key}`: the value of `{name}` is {body!r}, expected a mapping")
            found.append({"name": str(name), **body})
        return found
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadStudy(f"key `{key}` is {value!r}: expected a mapping by name")
    return [_mapping(item, f"key `{key}`: a value") for item in value]


def _restart(arm: str, record: Any) -> Restart:
    parts = dict(_mapping(record, f"key `restart` in arm {arm}", "a mapping, `{}` for an exact restart"))
    where = f"the restart of arm {arm}"
    order, loses = parts.get("order", Order.PLAN), parts.get("loses", ())
    if order not in list(Order):
        raise BadStudy(f"key `order` in {where} is {order!r}: expected one of {', '.join(Order)}")
    if not isinstance(loses, Sequence) or not set(loses) <= set(Loss):
        raise BadStudy(f"key `loses` in {where} is {loses!r}: expected a list of {', '.join(Loss)}")
    return _build(Restart, {**parts, "order": Order(order), "loses": tuple(map(Loss, loses))}, where)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _is_setting(value: Any) -> bool:
    return _is_word(value) or _is_number(value)


def _is_weight(value: Any) -> bool:
    return _is_whole(value) and value > 0


# by the annotation of a field: the check of a value, or of every member, and what was expected
VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_whole, "a whole number"), "float": (_is_number, "a number"), "str": (_is_word, "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false")}
LISTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tuple[int, ...]": (_is_whole, "a list of whole numbers"), "tuple[float, ...]": (_is_number, "a list of numbers"),
    "tuple[str, ...]": (_is_word, "a list of names")}
MAPPINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "Mapping[str, int]": (_is_weight, "names with weights, whole numbers above 0"),
    "Mapping[str, str]": (_is_word, "names with names"), "Mapping[str, Setting]": (_is_setting, "names with numbers or words")}


def _build(kind: type[T], record: Mapping[str, Any], where: str = "") -> T:
    """Build a dataclass from a mapping; every key is checked against the type of its field."""
    where = where or f"{kind.__name__.lower()} {record.get('name', '')}".rstrip()
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for key in sorted(record, key=str):
        if key not in known:
            raise BadStudy(f"unknown key `{key}` in {where}: expected {', '.join(known)}")
    for name, one in known.items():
        if name not in record and one.default is MISSING and one.default_factory is MISSING:
            raise BadStudy(f"key `{name}` is missing in {where}")
    values = {}
    for key, value in record.items():
        expected = _what_was_expected(str(known[key].type), value)
        if expected:
            raise BadStudy(f"key `{key}` in {where} is {value!r}: expected {expected}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _what_was_expected(annotation: str, value: Any) -> str:
    """What a value of this annotation should have been; empty where it is that, or where the annotation is no plain one."""
    if annotation in VALUES:
        holds, expected = VALUES[annotation]
        return "" if holds(value) else expected
    if annotation in LISTS:
        holds, expected = LISTS[annotation]
        return "" if isinstance(value, list | tuple) and all(map(holds, value)) else expected
    if annotation in MAPPINGS:
        holds, expected = MAPPINGS[annotation]
        is_good = isinstance(value, Mapping) and all(map(_is_word, value)) and all(map(holds, value.values()))
        return "" if is_good else expected
    return ""
