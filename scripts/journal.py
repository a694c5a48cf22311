"""Makes the journal's contract from its classes: the table of kinds in `docs/file_formats.md`, and the JSON Schema.

`python scripts/journal.py` writes both; a test compares. What the table says of a field is the comment behind it in
`chronicle/journal/events.py`.
"""

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chronicle.journal import events
from chronicle.journal.typed import EVENTS, JournalEvent

PAGE, SCHEMA = Path("docs/file_formats.md"), Path("chronicle/journal/schema.json")
BEGIN, END = "<!-- kinds: made by `python scripts/journal.py` -->", "<!-- end of kinds -->"
NUMBER = {"anyOf": [{"type": ["number", "null"]}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "str | None": {"type": ["string", "null"]},
    "int | None": {"type": ["integer", "null"]},
    "float | None": NUMBER,
    "bool": {"type": "boolean"},
    "bool | None": {"type": ["boolean", "null"]},
    "Texts": {"type": "array", "items": {"type": "string"}},
    "Items": {"type": "array"},
    "Records": {"type": "array", "items": {"type": "object"}},
    "Record": {"type": "object"},
    "Record | None": {"type": ["object", "null"]},
    "Any": {},
}


def comments() -> dict[str, dict[str, str]]:
    """Class -> field -> the comment behind it, of `events.py`."""
    source = inspect.getsource(events)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            rows = [row for row in node.body if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)]
            found[node.name] = {row.target.id: by_line[row.lineno] for row in rows if row.lineno in by_line}
    return found


def annotations(event: type[JournalEvent]) -> dict[str, str]:
    """Field -> its annotation, those of its bases first."""
    found: dict[str, str] = {}
    for base in reversed(event.__mro__):
        if issubclass(base, JournalEvent) and base is not JournalEvent:
            found |= inspect.get_annotations(base)
    return found


def render_kinds() -> str:
    """The table: each kind, what it says, its fields."""
    said = comments()
    rows = [_row(event, said) for event in EVENTS.values()]
    return "\n".join(["| kind | what it says | `data` |", "|---|---|---|", *rows])


def _row(event: type[JournalEvent], said: dict[str, dict[str, str]]) -> str:
    known = {name: text for base in reversed(event.__mro__) for name, text in said.get(base.__name__, {}).items()}
    fields = [f"`{field.key}`" + (f" ({known[name]})" if name in known else "") for name, field in event.FIELDS.items()]
    about = " ".join((event.__doc__ or "").split())
    return f"| `{event.KIND}` | {_cell(about)} | {_cell(', '.join(fields))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def render_schema() -> str:
    """A JSON Schema of one line of the journal; fields that it does not name are allowed everywhere."""
    entry = {
        "v": {"const": 1}, "id": {"type": "string", "pattern": "^[0-9A-HJKMNP-TV-Z]{26}$"}, "ts": {"type": "string"},
        "run": {"type": "string"}, "kind": {"type": "string"}, "step": {"type": "integer"}, "launch": {"type": "integer"},
        "title": {"type": "string"}, "refs": {"type": "array", "items": {"type": "string"}}, "data": {"type": "object"},
        "heads": {"type": "object", "additionalProperties": {"type": "string"}}, "writer": {"type": "string"},
        "seq": {"type": "integer", "minimum": 0}, "prev": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    }  # fmt: skip
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "One line of chronicle's journal, version 1",
        "type": "object",
        "properties": entry,
        "required": ["v", "id", "ts", "run", "kind", "writer", "seq", "prev"],
        "allOf": list(_rules()),
    }
    return json.dumps(schema, indent=1) + "\n"


def _rules() -> Iterator[dict[str, Any]]:
    for kind, event in EVENTS.items():
        types = annotations(event)
        properties = {field.key: TYPES[types[name]] for name, field in event.FIELDS.items()}
        data = {"description": re.split(r"(?<=[.:]) ", " ".join((event.__doc__ or "").split()))[0], "properties": properties}
        is_kind = {"properties": {"kind": {"const": str(kind)}}}
        yield {"if": is_kind, "then": {"properties": {"data": data}}}


def render_page(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{render_kinds()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(render_schema(), encoding="utf-8")
