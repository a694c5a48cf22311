"""The journal as a contract: what is written is what the schema and the page say, and both are made from the classes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chronicle.journal.events import EVENTS
from scripts.journal import BEGIN, END, PAGE, SCHEMA, TYPES, annotations, comments, render_page, render_schema

REPOSITORY = Path(__file__).parents[2]
STORED = sorted((REPOSITORY / "benchmarks/scoreboard/runs").glob("*.json"))
RUNS = [json.loads(path.read_text(encoding="utf-8")) for path in STORED]
JOURNALS = [text for files in RUNS for name, text in files.items() if "/journal/" in name]
LINES = [json.loads(line) for text in JOURNALS for line in text.splitlines()]


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    yield jsonschema.Draft202012Validator(json.loads((REPOSITORY / SCHEMA).read_text(encoding="utf-8")))


def test_the_page_and_the_schema_are_made_from_the_classes() -> None:
    page = (REPOSITORY / PAGE).read_text(encoding="utf-8")
    assert render_page(page) == page, "python scripts/journal.py"
    assert render_schema() == (REPOSITORY / SCHEMA).read_text(encoding="utf-8"), "python scripts/journal.py"
    table = page[page.index(BEGIN) : page.index(END)]
    assert re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE) == list(EVENTS)
    assert "`handed` (path and step of the checkpoint" in table and len(comments()["LaunchStart"]) > 5


def test_every_field_of_every_kind_has_a_type() -> None:
    for event in EVENTS.values():
        assert annotations(event).keys() == event.FIELDS.keys(), event
        assert set(annotations(event).values()) <= TYPES.keys(), event


def test_what_is_written_is_what_the_schema_says(schema: Any) -> None:
    """The journals of thirteen stored runs."""
    assert len(LINES) > 100 and len({line["kind"] for line in LINES} & set(EVENTS)) > 30
    for line in LINES:
        assert not list(schema.iter_errors(line)), line["kind"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "launch.start", "data": {"argv": "python train.py"}},
        {"kind": "launch.end", "data": {"exit_code": "1"}},
        {"kind": "note", "data": {"suspects": ["the data"]}},
        {"v": 2},
        {"seq": -1},
        {"id": "not an id"},
    ],
)
def test_a_field_of_another_type_is_none_of_the_schema(schema: Any, wrong: dict[str, Any]) -> None:
    assert list(schema.iter_errors({**LINES[0], **wrong}))
    assert not list(schema.iter_errors({**LINES[0], "kind": "of.later", "data": {"argv": 1}})), "a kind that nobody knows"
