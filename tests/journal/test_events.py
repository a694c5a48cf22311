"""Entries as typed values: old journals stay readable, unknown kinds are shown, unknown versions are refused by name.

`fixtures/` holds a journal with every kind, written before the classes existed: entries of real commands, launches and
studies, collected from a run of the tests, with names and long values shortened. `evidence.sealed`, `lr.mismatch` and
`moon.phase` are kinds that this version does not know: they are shown.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chronicle.errors import JournalError
from chronicle.journal import Entry, Journal, JournalWriter, read_journal
from chronicle.journal.events import (
    EVENTS,
    INTENTS,
    RECEIPTS,
    Close,
    EntryKind,
    GuardVerdict,
    Incident,
    JournalEvent,
    LaunchEnd,
    Note,
    RecoverReceipt,
    RollbackReceipt,
    UndoReceipt,
    UnknownKind,
    events_of,
    find_open_transaction,
    read,
)
from chronicle.paths import RunPaths

LATER = {  # kinds that came after the fixture was written
    EntryKind.RUN_PLACE,
    EntryKind.RUN_FORK,
    EntryKind.GUARD_ATTACHED,
    EntryKind.GUARD_FAULT,
    EntryKind.GUARD_FIRST_BATCH,
    EntryKind.REPLAY,
    EntryKind.RETAKEN,
    EntryKind.REHEARSAL,
    EntryKind.CHECKPOINT_SEEN,
    EntryKind.RESTART,
    EntryKind.LAUNCH_ATTEMPT,
    EntryKind.LAUNCH_SETTINGS,
}
FIXTURES = Path(__file__).parent / "fixtures"
# kinds that nothing writes any more
GONE = {"guard.batches", "evidence.sealed", "lr.mismatch", "telemetry.floors", "telemetry.constant", "experiment.retry"}
# keys that nothing writes or reads any more: shown as they stand
LEFT = {
    EntryKind.LAUNCH_END: {"latency_tested_ranks"},
    EntryKind.EXPERIMENT_REGISTER: {"seeds", "arms", "primary", "margin_bpb", "alpha", "contrasts", "study_digest"},
}
NAMED_BY_THE_RUN = {EntryKind.GATE}  # their fields are channels


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal with every kind, written by the version before the typed entries."""
    shutil.copytree(FIXTURES, tmp_path / "every-kind" / "journal")
    return read_journal(RunPaths(tmp_path / "every-kind"))


def entry(number: int, kind: str, *, refs: tuple[str, ...] = (), **data: Any) -> Entry:
    """An entry with a readable id."""
    return Entry(
        id=f"E{number}",
        ts="2026-05-18T14:25:00+00:00",
        run="r",
        writer="w",
        seq=number,
        prev="",
        kind=kind,
        refs=refs,
        data=data,
    )


def test_old_journal_of_every_kind_is_read_and_written_back_unchanged(journal: Journal) -> None:
    """Every entry becomes a value of its kind; its JSON form is the data as it stands on disk."""
    assert journal.problems == ()
    assert {entry.kind for entry in journal.entries} == {*EntryKind, "moon.phase", *GONE} - LATER
    for one in journal.entries:
        event = read(one)
        assert type(event) is EVENTS.get(one.kind, UnknownKind)
        assert event.to_json() == one.data
        assert type(event).from_json(json.loads(json.dumps(event.to_json()))) == event


def test_every_key_of_an_old_journal_is_a_field(journal: Journal) -> None:
    """What today's writers write has a name and a type here; a field reads as itself unless it is empty or null."""
    for one in journal.entries:
        if one.kind in EVENTS and one.kind not in NAMED_BY_THE_RUN:
            fields = {field.key: name for name, field in EVENTS[one.kind].FIELDS.items()}
            event = read(one)
            for key in one.data.keys() - LEFT.get(EntryKind(one.kind), set()):
                value, found = one.data[key], getattr(event, fields[key])
                shown = list(found) if isinstance(found, tuple) else found
                assert shown == value or value is None, (one.kind, key, value, shown)


def test_every_field_stands_in_the_old_journal_where_it_must(journal: Journal) -> None:
    """A field that is always written is in every old entry of its kind."""
    for one in journal.entries:
        if one.kind in EVENTS:
            always = {field.key for field in EVENTS[one.kind].FIELDS.values() if field.required}
            assert always <= set(one.data), one.kind


def test_each_kind_has_one_class() -> None:
    """`EntryKind` and the classes are the same list."""
    assert set(EVENTS) == set(EntryKind)
    assert all(kind == event.KIND and event.__doc__ for kind, event in EVENTS.items())
    assert len({event.__name__ for event in EVENTS.values()}) == len(EVENTS)


def test_unknown_kind_keeps_all_it_says(journal: Journal) -> None:
    """A newer program may have written it: it is shown, not dropped."""
    (moon,) = [one for one in journal.entries if one.kind == "moon.phase"]
    event = read(moon)
    assert isinstance(event, UnknownKind) and event.to_json() == moon.data


def test_unknown_version_is_refused_by_name() -> None:
    """The entry, the kind, the version found and the versions known; the way out is to update."""
    newer = entry(1, EntryKind.ROLLBACK_RECEIPT, v=3, intent="E0")
    with pytest.raises(JournalError, match=r"entry E1: `rollback.receipt` in version 3: expected version 1") as problem:
        RollbackReceipt.of(newer)
    assert "update chronicle" in str(problem.value.remedy)
    for odd in (0, "1", True, None, 1.5):
        with pytest.raises(JournalError, match="expected version 1"):
            Note.from_json({"v": odd})


def test_unknown_fields_of_a_known_version_are_kept() -> None:
    """A newer program may add an optional field; reading and writing again must not lose it."""
    data = {"verdict": "passed", "identity": {"sha256": "00"}}
    assert GuardVerdict.from_json(data).to_json() == data


def test_field_of_another_type_reads_as_absent() -> None:
    """Imported journals say what they like; a wrong type is not guessed at."""
    end = LaunchEnd.from_json(
        {"exit_code": "zero", "last_step": True, "sealed": "x", "tail": None, "duration_seconds": 3}
    )
    assert (end.exit_code, end.last_step, end.sealed, end.tail, end.duration_seconds) == (None, None, (), (), 3.0)


def test_event_writes_what_it_was_given_and_nothing_empty() -> None:
    """A field without default is always written, null included; one with a default only when it says something."""
    assert Close(outcome="worked", text="", rule="look").to_json() == {"outcome": "worked", "rule": "look"}
    assert RecoverReceipt(intent=None, outcome="reverted").to_json() == {"intent": None, "outcome": "reverted"}
    assert Incident(onset_step=0, import_={"n": 1}).to_json() == {"onset_step": 0, "import": {"n": 1}}
    with pytest.raises(TypeError, match="missing fields"):
        Close(text="x")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unknown fields"):
        Close(outcome="worked", txet="x")  # type: ignore[call-arg]


def test_event_is_frozen() -> None:
    """Values that travel do not change."""
    note = Note(text="a")
    with pytest.raises(AttributeError):
        note.text = "b"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        note.other = "b"  # type: ignore[attr-defined]
    assert note == Note(text="a") != Note(text="b")
    assert repr(note) == "Note(text='a')"


def test_written_event_is_read_again(tmp_path: Path) -> None:
    """Through the real writer and reader."""
    paths = RunPaths(tmp_path / "r")
    with JournalWriter(paths) as writer:
        writer.write(Note(text="seen", suspects=({"cause": "lr"},)), step=3, title="t")
    ((found, note),) = events_of(read_journal(paths).entries, Note)
    assert (found.step, note) == (3, Note(text="seen", suspects=({"cause": "lr"},)))


# --- open transactions -------------------------------------------------------------------------------------------------

ROLLBACK = entry(1, EntryKind.ROLLBACK_INTENT)
UNDO = entry(2, EntryKind.UNDO_INTENT)


@pytest.mark.parametrize(
    ("entries", "open_id"),
    [
        ([], None),
        ([ROLLBACK], "E1"),
        ([ROLLBACK, entry(3, EntryKind.ROLLBACK_RECEIPT, intent="E1")], None),
        ([ROLLBACK, entry(3, EntryKind.RECOVER_RECEIPT, intent="E1", outcome="reverted")], None),
        ([entry(3, EntryKind.ROLLBACK_RECEIPT, intent="E1"), ROLLBACK], None),  # hosts' clocks differ
        ([ROLLBACK, entry(3, EntryKind.ROLLBACK_RECEIPT, refs=("E1",))], None),  # older journals name it in `refs` alone
        ([ROLLBACK, entry(3, EntryKind.ROLLBACK_RECEIPT, refs=("E1",), intent="E9")], "E1"),  # it says whose receipt it is
        ([ROLLBACK, entry(3, EntryKind.ROLLBACK_RECEIPT, imported=True)], "E1"),
        ([ROLLBACK, entry(3, EntryKind.UNDO_RECEIPT, intent="E1")], "E1"),  # an undo ends no rollback that is open
        ([UNDO, entry(3, EntryKind.ROLLBACK_RECEIPT, intent="E2")], "E2"),
        ([UNDO, entry(3, EntryKind.UNDO_RECEIPT, refs=("E0", "E2"), undoes="E0", intent="E2")], None),
        ([UNDO, entry(3, EntryKind.RECOVER_RECEIPT, intent="E2", outcome="finished")], None),
        ([ROLLBACK, UNDO], "E1"),  # the oldest: it has to be recovered first
        ([ROLLBACK, UNDO, entry(3, EntryKind.RECOVER_RECEIPT, intent="E1", outcome="reverted")], "E2"),
        ([ROLLBACK, entry(3, "note", refs=("E1",)), entry(4, EntryKind.CLOSE, refs=("E1",), outcome="failed")], "E1"),
        ([ROLLBACK, entry(3, EntryKind.ROLLBACK_RECEIPT, id="E1")], "E1"),  # a field that no version wrote
    ],
)
def test_transaction_is_open_until_its_own_receipt_or_a_recovery(entries: list[Entry], open_id: str | None) -> None:
    """The one answer for `run`, the guard, `rollback`, `undo`, `recover` and `status`."""
    found = find_open_transaction(entries)
    assert (None if found is None else found.id) == open_id


def test_receipt_of_an_unknown_version_is_not_taken_for_an_answer() -> None:
    """What it closes is not known, so whether a transaction is open is not known either."""
    receipt = entry(3, EntryKind.ROLLBACK_RECEIPT, intent="E1")
    with pytest.raises(JournalError, match="version 2"):
        find_open_transaction([ROLLBACK, replace(receipt, data={**receipt.data, "v": 2})])


def test_receipts_and_intents_name_their_transaction(journal: Journal) -> None:
    """In the old journal every intent is answered by the receipts that name it."""
    intents = [one.id for one in journal.entries if one.kind in INTENTS]
    named = [read(one) for one in journal.entries if one.kind in RECEIPTS]
    assert all(isinstance(event, RollbackReceipt | UndoReceipt | RecoverReceipt) and event.intent for event in named)
    assert intents and all(isinstance(event, JournalEvent) for event in named)
