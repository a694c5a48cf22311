"""A study from a YAML file or a registered plan. Unknown, missing and misshapen keys are errors with the key's place.

A misspelt treatment would be a study of nothing, and a word where a number belongs would be found after an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from experiments.definition import VERSION, Answer, Arm, Contrast, Loss, Order, Profile, Restart, Study
from experiments.errors import BadStudy

__all__ = ["find_study", "list_studies", "parse_study", "study_from_json"]

STUDIES_DIR = Path(__file__).parent / "studies"

T = TypeVar("T")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_word(value: Any) -> bool:
    return isinstance(value, str)


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and all(map(check, value))


def _are_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_word(name) and _is_whole(n) and n > 0 for name, n in value.items())


def _are_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_word(key) and _is_word(name) for key, name in value.items())


SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # by the annotation of a field
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "str": (_is_word, "text"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "tuple[int, ...]": (_all(_is_whole), "a list of whole numbers"),
    "tuple[float, ...]": (_all(_is_number), "a list of numbers"),
    "tuple[str, ...]": (_all(_is_word), "a list of names"),
    "Mapping[str, int]": (_are_weights, "names with weights, whole numbers above 0"),
    "Mapping[str, str]": (_are_names, "names with names"),
}


def list_studies() -> tuple[str, ...]:
    """Names of the studies that come with the product."""
    return tuple(sorted(path.stem for path in STUDIES_DIR.glob("*.yaml")))


def find_study(name_or_path: str) -> Study:
    """A study that comes with the product, or a YAML file of the user's own. Raises `BadStudy`."""
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BadStudy(f"study file `{path}` does not exist")
    else:
        path = STUDIES_DIR / f"{name_or_path}.yaml"
        if name_or_path not in list_studies():
            raise BadStudy(
                f"unknown study `{name_or_path}`: expected a YAML file or one of {', '.join(list_studies())}"
            )
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
    """The inverse of `Study.to_json`, and the reading of a parsed file (named lists may be mappings by name)."""
    parts = {key: value for key, value in record.items() if key != "v"}
    try:
        parts["arms"] = tuple(_arm(item) for item in _listed(parts.get("arms"), "arms"))
        parts["contrasts"] = tuple(_build(Contrast, item) for item in _listed(parts.get("contrasts", ()), "contrasts"))
        parts["answers"] = tuple(_build(Answer, item) for item in _answers(parts.get("answers", ())))
        parts["profiles"] = tuple(_build(Profile, item) for item in _listed(parts.get("profiles"), "profiles"))
        return _build(Study, parts)
    except BadStudy as problem:
        raise BadStudy(f"`{where}`: {problem.message}", problem.remedy) from problem


def _arm(record: Mapping[str, Any]) -> Arm:
    restart = record.get("restart")
    return _build(Arm, {**record, "restart": None if restart is None else _restart(record["name"], restart)})


def _restart(arm: str, record: Any) -> Restart:
    if not isinstance(record, Mapping):
        raise BadStudy(f"key `restart` in arm {arm} is {record!r}: expected a mapping, `{{}}` for an exact restart")
    parts = dict(record)
    for key, kind in (("order", Order), ("loses", Loss)):
        words, known = parts.get(key, () if key == "loses" else Order.PLAN), ", ".join(kind)
        try:
            parts[key] = kind(words) if kind is Order else tuple(kind(one) for one in words)
        except (ValueError, TypeError) as problem:
            listed = "a list of " if kind is Loss else "one of "
            raise BadStudy(f"key `{key}` in the restart of arm {arm} is {words!r}: expected {listed}{known}") from problem
    return _build(Restart, parts, f"the restart of arm {arm}")


def _listed(value: Any, key: str) -> Sequence[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        value = [{"name": str(name), **body} if isinstance(body, Mapping) else {"name": str(name), "": body}
                 for name, body in value.items()]  # fmt: skip
    if isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            if not isinstance(item, Mapping) or "" in item:
                told = item.get("") if isinstance(item, Mapping) else item
                named = f" of `{item['name']}`" if isinstance(item, Mapping) else ""
                raise BadStudy(f"key `{key}`: the value{named} is {told!r}, expected a mapping")
        return value
    raise BadStudy(f"key `{key}` is {value!r}: expected a mapping by name")


def _answers(value: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        return [{"name": str(name), "by": by} for name, by in value.items()]
    return _listed(value, "answers")


def _build(kind: type[T], record: Mapping[str, Any], where: str = "") -> T:
    """A dataclass from a mapping, with every key checked against the field's own type."""
    where = where or f"{kind.__name__.lower()} {record.get('name', '')}".rstrip()
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(record) - set(known), key=str)
    if unknown:
        raise BadStudy(f"unknown key `{unknown[0]}` in {where}: expected {', '.join(known)}")
    missing = [name for name, one in known.items() if name not in record and one.default is one.default_factory is MISSING]
    if missing:
        raise BadStudy(f"key `{missing[0]}` is missing in {where}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
    for key, value in values.items():
        check, expected = SHAPES.get(str(known[key].type), (lambda _: True, ""))
        if not check(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise BadStudy(f"key `{key}` in {where} is {shown!r}: expected {expected}")
    return kind(**values)
