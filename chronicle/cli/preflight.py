"""`chronicle preflight`: checks PF01 to PF31 of this host, this run, and the facts that its trainer reports."""

import json as json_format
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from chronicle.audit.claims import read_quantity
from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, ExitCode
from chronicle.cli.rehearse import said_of
from chronicle.errors import UsageProblem
from chronicle.journal import Entry, read_journal
from chronicle.journal.events import LaunchStart, Preflight, events_of
from chronicle.launch.ending import free_bytes
from chronicle.preflight.facts import Baseline, TrainerFacts
from chronicle.preflight.gate import check_facts, read_baseline, require_known
from chronicle.preflight.host import Host, check_host, measured_save_seconds
from chronicle.preflight.results import CheckResult, CheckVerdict, count_verdicts

DEFAULT_GRACE_SECONDS = 90.0


def preflight(
    launcher: list[str] | None = None,
    facts: Path | None = None,
    params: str | None = None,
    devices: int | None = None,
    skip: list[str] | None = None,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Check a launch before it spends GPU hours.

    It checks shards, counts, devices, plan, LR, labels, disk, save time, stray files and orphans. What cannot be
    checked is reported as unknown and does not count as passed. Exit code 3 when a check failed.

    Example: chronicle preflight --params 1.21B --devices 4 -- torchrun --nproc_per_node 4 train.py

    Options:
      LAUNCHER: The launcher after `--`.
      --facts FILE: JSON file with the trainer's facts [those of its last launch].
      --params N: Parameters that the model must have, within 1 %.
      --devices N: Devices that the launch must use.
      --skip PFnn: Skip a check (repeatable).
    """
    settings = at.settings()
    command = tuple(launcher or ())
    skipped = require_known(skip or ())
    entries = read_journal(settings.paths).entries
    host = Host(
        paths=settings.paths,
        checkpoints_dir=settings.checkpoints_dir,
        entries=entries,
        environ=os.environ,
        command=command or _last_command(entries),
        grace_seconds=DEFAULT_GRACE_SECONDS,
    )
    known, source = _find_facts(facts, entries)
    known = replace(known, save_seconds=known.save_seconds or measured_save_seconds(entries))
    from_host = {one.check: one for one in check_host(host, skip=skipped)}
    expected = _expectation(entries, params, devices, settings.checkpoints_dir)
    from_facts = {one.check: one for one in check_facts(known, expected, skip=skipped)}
    results = tuple(sorted((from_facts | _better(from_host, from_facts)).values(), key=lambda one: one.check))
    failed = any(one.verdict is CheckVerdict.FAIL for one in results)
    lines = [line for one in results if one.verdict is not CheckVerdict.UNKNOWN for line in _lines(one)]
    unread = [one.title for one in results if one.verdict is CheckVerdict.UNKNOWN]
    if unread:
        lines.append(f"not checked: {', '.join(unread)} (a launch under the guard answers most; `--json` says what each needs)")
    lines.append(f"{count_verdicts(results)}; trainer's facts: {source}")
    if command:
        lines.append(said_of(command, entries, Path.cwd(), time.time()))
    data = {"checks": [one.to_json() for one in results], "facts": source}
    return CommandResult(lines=lines, data=data, exit_code=ExitCode.REFUSED if failed else ExitCode.DONE)


def _last_command(entries: tuple[Entry, ...]) -> tuple[str, ...]:
    """The launcher of the newest launch, where none is named."""
    return next((start.argv for _, start in reversed(list(events_of(entries, LaunchStart)))), ())


def _better(host: Mapping[str, CheckResult], facts: Mapping[str, CheckResult]) -> dict[str, CheckResult]:
    """The host's results, without unknown ones that the trainer's facts answer."""
    unknown = CheckVerdict.UNKNOWN
    return {
        name: one
        for name, one in host.items()
        if one.verdict is not unknown or name not in facts or facts[name].verdict is unknown
    }


def _find_facts(path: Path | None, entries: tuple[Entry, ...]) -> tuple[TrainerFacts, str]:
    if path is not None:
        try:
            return TrainerFacts.from_json(json_format.loads(path.read_text(encoding="utf-8"))), str(path)
        except (OSError, ValueError, TypeError) as error:
            raise UsageProblem(f"cannot read trainer's facts from `{path}`: {error}") from error
    for entry, found in reversed(list(events_of(entries, Preflight))):
        if found.facts:
            try:
                return TrainerFacts.from_json(found.facts), f"launch {entry.launch}, entry {entry.id}"
            except (ValueError, TypeError):
                continue
    return TrainerFacts(), "none yet: a trainer reports them with `check_before_first_step`"


def _expectation(
    entries: tuple[Entry, ...], params: str | None, devices: int | None, checkpoints: Path | None
) -> Baseline:
    claimed = None
    if params is not None:
        wanted = read_quantity(params)
        claimed = (wanted.low + wanted.high) / 2
    return replace(
        read_baseline(entries, os.environ),
        claimed_params=claimed,
        claimed_devices=devices,
        accepted_change=None,
        grace_seconds=DEFAULT_GRACE_SECONDS,
        free_bytes=None if checkpoints is None else free_bytes(checkpoints),
    )


def _lines(one: CheckResult) -> Iterator[str]:
    yield f"{one.check}  {one.verdict.value:<8} {one.title}: {one.message}"
    if one.remedy and one.verdict in (CheckVerdict.FAIL, CheckVerdict.WARN):
        yield f"{'':16}hint: {one.remedy}"


preflight.context_settings = {"allow_interspersed_args": False}  # type: ignore[attr-defined]  # the launcher's own words
