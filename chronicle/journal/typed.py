"""What a typed event is: named fields over the JSON record of a journal entry. The kinds are in `chronicle.journal.events`.

An unknown version is refused with `JournalError`: a field that means something else must not be misread. The version is the
key `v` of an entry's data; absent means 1. Fields that this program does not know are kept: `from_json` followed by `to_json`
changes nothing.

Reading is lenient about single fields, because people import foreign journals: a field that is absent or has another type
reads as its default (None, "", False, (), {}). What must be there is checked where it is used.

The classes are frozen keyword-only dataclasses for type checkers (PEP 681, `typing.dataclass_transform`). They are not made
by `dataclasses.dataclass`: it generates code for every class at import, about 30 ms for 48 classes in every command. These take
1.5 ms. An event keeps its JSON record and converts a field when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

from chronicle.errors import JournalError
from chronicle.journal.entries import Entry

# The types of fields that are lists or objects; a field is annotated with one of the names in `_READ`.
Record = Mapping[str, Any]
Records = tuple[Mapping[str, Any], ...]
Texts = tuple[str, ...]
Items = tuple[Any, ...]

NOTHING: Record = {}
LISTS = (list, tuple)


def _only(kind: type | tuple[type, ...], convert: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
    """What reads a value of this type, and gives None for one of another type. A bool is no number."""

    def read(value: Any) -> Any:
        if isinstance(value, bool) and kind is not bool:
            return None
        return convert(value) if isinstance(value, kind) else None

    return read


def _records(items: Any) -> Records:
    return tuple(item for item in items if isinstance(item, Mapping))


# Annotation -> (what an absent field reads as, conversion; None = another type than announced)
_READ: Mapping[str, tuple[Any, Callable[[Any], Any]]] = {
    "str": ("", _only(str)),
    "str | None": (None, _only(str)),
    "int | None": (None, _only(int)),
    "float | None": (None, _only((int, float), float)),
    "bool": (False, _only(bool)),
    "bool | None": (None, _only(bool)),
    "Texts": ((), _only(LISTS, lambda items: tuple(map(str, items)))),
    "Items": ((), _only(LISTS, tuple)),
    "Records": ((), _only(LISTS, _records)),
    "Record": (NOTHING, _only(Mapping)),
    "Record | None": (None, _only(Mapping)),
    "Any": (None, lambda value: value),
}


class _Field:
    """One field of an event, read from the event's JSON record."""

    __slots__ = ("absent", "convert", "key", "required")

    def __init__(self, name: str, annotation: str, required: bool) -> None:
        self.key = name.rstrip("_")  # `import_` is written as `import`
        self.absent, self.convert = _READ[annotation]
        self.required = required  # written even when it is None; an optional one only when it says something

    def __get__(self, event: JournalEvent | None, owner: type[JournalEvent]) -> Any:
        if event is None:
            return self
        found = self.convert(event.record.get(self.key))
        return self.absent if found is None else found


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Schema(type):
    """Makes an event class: annotated names become fields, the class is registered under its kind."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], kind: str | None = None) -> _Schema:
        fields: dict[str, _Field] = {}
        for base in bases:
            fields |= getattr(base, "FIELDS", {})
        for field, annotation in body.get("__annotations__", {}).items() if bases else ():
            body[field] = fields[field] = _Field(field, annotation, field not in body)
        made = super().__new__(mcs, name, bases, {"__slots__": (), "FIELDS": fields, **body})
        if kind is not None:
            made.KIND = kind  # type: ignore[attr-defined]
            EVENTS[kind] = made  # type: ignore[assignment]
        return made


EVENTS: dict[str, type[JournalEvent]] = {}  # kind -> its class, filled where the classes are defined


class JournalEvent(metaclass=_Schema):
    """What an entry of one kind says. Frozen; `record` is its JSON form."""

    __slots__ = ("record",)
    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 1
    FIELDS: ClassVar[Mapping[str, Any]]
    if TYPE_CHECKING:  # a property for type checkers, so that `record` is no field of the events

        @property
        def record(self) -> Record:
            """The JSON form."""

    def __init__(self, **values: Any) -> None:
        unknown = sorted(values.keys() - self.FIELDS.keys())
        missing = [name for name, field in self.FIELDS.items() if field.required and name not in values]
        if unknown or missing:
            raise TypeError(f"{type(self).__name__}: unknown fields {unknown}, missing fields {missing}")
        record: dict[str, Any] = {"v": self.VERSION} if self.VERSION > 1 else {}
        for name, value in values.items():
            field = self.FIELDS[name]
            if field.required or (value is not None and value != field.absent):
                record[field.key] = list(value) if isinstance(value, tuple) else value
        object.__setattr__(self, "record", record)

    @classmethod
    def from_json(cls, data: Record) -> Self:
        """The event of an entry's `data`; raises `JournalError` for a version that this program does not know."""
        version = data.get("v", 1)
        if type(version) is not int or not 1 <= version <= cls.VERSION:
            found = f"`{cls.KIND}` in version {version!r}: expected version {cls.VERSION}"
            raise JournalError(found, "a newer chronicle wrote it: update chronicle")
        return cls.view(data)

    @classmethod
    def view(cls, data: Record) -> Self:
        """These fields read from any record, whatever its kind and version."""
        event = object.__new__(cls)
        object.__setattr__(event, "record", data)
        return event

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """The event of an entry of this kind; raises `JournalError`, which names the entry, for an unknown version."""
        try:
            return cls.from_json(entry.data)
        except JournalError as problem:
            raise JournalError(f"entry {entry.id}: {problem.message}", problem.remedy) from problem

    def to_json(self) -> dict[str, Any]:
        """The `data` of its entry."""
        return dict(self.record)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is frozen")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JournalEvent) and type(other) is type(self) and self.record == other.record

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        said = [f"{name}={getattr(self, name)!r}" for name, field in self.FIELDS.items() if field.key in self.record]
        return f"{type(self).__name__}({', '.join(said)})"
