"""Claims looked at again, and numbers in notes: what was said still has to agree with what ranks recorded.

`recheck_claims` serves `chronicle audit`, `lint_note` serves `chronicle note`: it warns and never blocks, because a note
may well speak of another run.
"""

from __future__ import annotations

from collections.abc import Iterator

from chronicle.audit.claims import Verdict, judge_claim
from chronicle.audit.evidence import RunEvidence, read_evidence
from chronicle.audit.evidence_statements import Kind, parse_claim
from chronicle.journal import read_journal
from chronicle.paths import RunPaths

__all__ = ["lint_note", "recheck_claims"]

LONGEST_NOTE = 4000  # characters looked at: a note with a pasted log is still written at once
FROM_RANKS = frozenset(
    (Kind.PARAMETERS, Kind.DEVICES, Kind.RANKS, Kind.HOSTS, Kind.DATASET, Kind.PRECISION, Kind.WRAPPER)
)


def recheck_claims(evidence: RunEvidence) -> Iterator[tuple[str, str]]:
    """(entry id, sentence) for every claim that is contradicted now, or answered otherwise than when it was made."""
    for entry in evidence.entries:
        text = entry.data.get("text") if entry.kind == "claim" else None
        if not isinstance(text, str):
            continue
        verdicts = {one.verdict for one in judge_claim(text, evidence)}
        now = next((one for one in (Verdict.CONTRADICTED, Verdict.UNSUPPORTED) if one in verdicts), Verdict.SUPPORTED)
        before = entry.data.get("verdict")
        if now.value != before:
            yield entry.id, f"claim `{text}` was {before} and is {now.value} now"
        elif now is Verdict.CONTRADICTED:
            yield entry.id, f"claim `{text}` is contradicted by what ranks recorded"


def lint_note(paths: RunPaths, text: str) -> tuple[str, ...]:
    """Warnings about numbers in a note that the ranks' own records contradict; empty for nearly every note."""
    text = text[:LONGEST_NOTE]
    if not any(one.kind in FROM_RANKS for one in parse_claim(text)) or not paths.launches_dir.is_dir():
        return ()
    evidence = read_evidence(paths, read_journal(paths), metrics=False)
    contradicted = (one for one in judge_claim(text, evidence) if one.verdict is Verdict.CONTRADICTED)
    return tuple(f"warning: `{one.statement.text}`: {one.message}" for one in contradicted if one.statement.kind in FROM_RANKS)
