"""`chronicle audit` checks the records of a run, and `claim` judges what will be published."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from chronicle.audit.claims import ClaimVerdict, Judgement, judge_claim, list_unjudged, overall, recheck_claims
from chronicle.audit.evidence import read_evidence
from chronicle.cli.options import (
    AT_CHECKPOINTS,
    IN_RUN,
    AtCheckpoints,
    CommandResult,
    ExitCode,
    Given,
    InRun,
)
from chronicle.errors import UsageProblem
from chronicle.journal import Journal, JournalWriter, read_journal
from chronicle.journal.events import Claim, EntryKind, words_of
from chronicle.journal.reader import anchor_heads, find_damage
from chronicle.journal.writer import id_milliseconds
from chronicle.launch.record import broken_seals
from chronicle.paths import RunPaths
from chronicle.story import read_story
from chronicle.story.plain import format_age
from rollback.checkpoint.listing import list_checkpoints
from rollback.checkpoint.manifest import read_manifest
from rollback.checks.verify import compare_manifest
from rollback.disk.content import sha256_of
from rollback.errors import Finding, Severity, UnreadableFile

SKEW_SECONDS = 60


def audit(full: bool = False, at: AtCheckpoints = AT_CHECKPOINTS) -> CommandResult:
    """Check the journal, logs, attachments, manifests and claims.

    It checks journal chains, clocks, per-step logs, attachments, sealed logs, manifests and claims.

    Example: chronicle audit --json

    Options:
      --full: Read also every byte of the checkpoints.
    """
    settings = at.existing()
    settings.say_store("their manifests are not compared; `chronicle verify` reads them there")
    paths, journal = settings.paths, read_journal(settings.paths)
    findings = list(_findings(paths, journal, settings.checkpoints_dir, full))
    bad = sum(one.severity is not Severity.INFO for one in findings)
    lines = [f"{one.severity.value}: {one.check} {one.path}: {one.message}" for one in findings]
    told = f"{bad} finding(s)" if bad else "chains unbroken"
    lines.append(f"journal: {len(journal.entries)} entries, {len(journal.heads)} writers, {told}")
    data = {
        "v": 1,
        "run": settings.run,
        "entries": len(journal.entries),
        "writers": len(journal.heads),
        "heads": dict(journal.heads),
        "findings": [one.to_json() for one in findings],
    }
    return CommandResult(lines=lines, data=data, exit_code=ExitCode.FINDINGS if bad else ExitCode.DONE)


def _findings(paths: RunPaths, journal: Journal, checkpoints: Path | None, full: bool) -> Iterator[Finding]:
    """Damage that forbids decisions and other lines that are wrong, then what else contradicts itself."""
    damage = find_damage(paths, journal)
    for problem in (*damage, *(one for one in journal.problems if one not in damage)):
        # A crash can cut the last line of a writer short; the lines before it are not affected.
        severity = Severity.WARN if problem.check == "torn-line" else Severity.ERROR
        where = _within(paths, problem.path) + (f":{problem.line}" if problem.line else "")
        yield Finding(problem.check, severity, where, problem.message)
    for writer, behind in _clocks(journal).items():
        text = f"its clock was {format_age(behind)} behind earlier entries; the order follows the ids"
        yield Finding("clock-skew", Severity.INFO, f"journal/{writer}.jsonl", text)
    launches = {launch.number: launch for launch in read_story(paths, journal=journal).launches}
    for number in range(1, max(launches, default=0) + 1):
        if number not in launches:
            text = f"no `{EntryKind.LAUNCH_START}` entry: its journal file is missing here"
            yield Finding("launch-missing", Severity.WARN, f"launches/{number:04d}", text)
    for number, launch in launches.items():
        log = paths.metrics_path(number)
        if launch.span.has_steps and not log.exists():
            yield Finding("no-metrics", Severity.INFO, _within(paths, log), "the launch has steps but no per-step log")
    yield from _objects(journal, paths)
    for sentence in broken_seals(paths, journal.entries).values():
        yield Finding("seal-broken", Severity.WARN, "launches", sentence)
    if any(entry.kind == EntryKind.CLAIM for entry in journal.entries):
        for entry_id, sentence, is_bad in recheck_claims(read_evidence(paths, journal)):
            yield Finding("claim", Severity.WARN if is_bad else Severity.INFO, entry_id, sentence)
    for checkpoint in list_checkpoints(checkpoints) if checkpoints is not None and checkpoints.is_dir() else ():
        try:
            manifest = read_manifest(checkpoint.folder)
        except UnreadableFile as problem:
            yield Finding("manifest", Severity.WARN, str(checkpoint.path), str(problem))
            continue
        for finding in compare_manifest(checkpoint.folder, manifest, full=full) if manifest is not None else ():
            yield finding._replace(path=f"{checkpoint.path}/{finding.path}")


def _within(paths: RunPaths, path: Path) -> str:
    return path.relative_to(paths.run_dir).as_posix()


def _clocks(journal: Journal) -> dict[str, float]:
    """Writer -> the most seconds that its clock was behind the ids of its entries."""
    worst: dict[str, float] = {}
    for entry in journal.entries:
        known = id_milliseconds(entry.id)
        try:
            behind = 0.0 if known is None else known / 1000 - datetime.fromisoformat(entry.ts).timestamp()
        except ValueError:
            continue
        if behind > SKEW_SECONDS:
            worst[entry.writer] = max(behind, worst.get(entry.writer, 0.0))
    return worst


def _objects(journal: Journal, paths: RunPaths) -> Iterator[Finding]:
    """Attachments that are gone or changed."""
    for entry in journal.entries:
        for item in words_of(entry).evidence:
            digest = item.get("sha256") if isinstance(item, Mapping) else None
            if not isinstance(digest, str) or len(digest) != 64 or not digest.isalnum():
                continue
            path = paths.object_path(digest)
            if not path.exists():
                text = f"attachment `{item.get('path', '')}` of entry {entry.id} is gone"
                yield Finding("object-missing", Severity.WARN, _within(paths, path), text)
                continue
            found = sha256_of(path)
            if found != digest:
                text = f"attachment of entry {entry.id} has digest {found[:12]}…: it was changed"
                yield Finding("object-changed", Severity.WARN, _within(paths, path), text)


# --- chronicle claim

LONGEST_SENTENCE = 4000
Number = Annotated[str | None, Option(metavar="N")]
Word = Annotated[str | None, Option(metavar="NAME")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields(Given):
    """What a claim may state."""

    params: Number = None
    devices: Number = None
    device_name: Word = None
    ranks: Number = None
    hosts: Number = None
    data: Word = None
    precision: Word = None
    wrapper: Word = None
    steps: Number = None
    tokens: Number = None
    samples: Number = None
    bytes: Number = None
    final_loss: Number = None
    best_loss: Number = None
    hours: Number = None
    resumes: Annotated[str | None, Option(metavar="exactly")] = None


NO_FIELDS = Fields()


def claim(
    sentence: Annotated[str, Argument(help="The sentence as it will be published.", show_default=False)] = "",
    stated: Fields = NO_FIELDS,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Judge what will be published against recorded facts.

    Each field is SUPPORTED, CONTRADICTED or has NO EVIDENCE. The sentence is recorded and not parsed; its numbers that
    no field states are listed as not judged. A number is exact; 1.21B stands for what rounds to it. Devices are
    accelerators: a CPU is none. Exit code 5 unless all is supported.

    Example: chronicle claim --params 1.21B --devices 4 --data wikitext-103 "trained 1.21B on 4 GPUs on WikiText-103"
    """
    fields = {name: value for name, value in asdict(stated).items() if value is not None}
    if not fields:
        raise UsageProblem("no field to judge", f"chronicle claim --params N --devices N {shlex.quote(sentence or '…')}")
    if len(sentence) > LONGEST_SENTENCE:
        raise UsageProblem(f"the sentence has {len(sentence)} characters: expected at most {LONGEST_SENTENCE}")
    paths = at.existing().paths
    journal = read_journal(paths)
    judgements = judge_claim(fields, read_evidence(paths, journal))
    unjudged = list_unjudged(sentence, fields)
    verdict = overall(judgements, unjudged)
    recorded = {
        "text": sentence,
        "verdict": verdict.value,
        "fields": fields,
        "not_judged": list(unjudged),
        "statements": [one.to_json() for one in judgements],
    }
    with JournalWriter(paths) as writer:
        event = Claim.from_json({**recorded, "journal_heads": anchor_heads(journal)})
        told = sentence or ", ".join(f"{name} {value}" for name, value in fields.items())
        entry = writer.write(event, title=f"{verdict.value}: {told}"[:200])
    lines = [f"{one.verdict.value:<12}  {one.field} {one.said}: {one.message}{_where(one)}" for one in judgements]
    lines += [f"not judged: {number}" for number in unjudged]
    lines.append(f"{verdict.value}  {told}")
    code = ExitCode.DONE if verdict is ClaimVerdict.SUPPORTED else ExitCode.FINDINGS
    return CommandResult(lines=lines, data={"id": entry.id, **recorded}, exit_code=code)


def _where(one: Judgement) -> str:
    more = ", …" if len(one.evidence) > 3 else ""
    return f"  [{', '.join(one.evidence[:3])}{more}]" if one.evidence else ""
