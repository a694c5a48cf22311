"""`chronicle import`: old runs out of logs, journals and other trackers' stores; a store of several runs becomes several."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.cli.options import IN_RUN, CommandResult, InRun, settings_from
from chronicle.errors import Refusal, UsageProblem
from chronicle.paths import RunPaths

if TYPE_CHECKING:
    from chronicle.integrations.importing import Imported
    from chronicle.integrations.trackers import Tracked
    from rollback.detect import Event

SHOWN_RUNS = 12


def import_(
    sources: list[str],
    format_name: str | None = None,
    uri: str | None = None,
    at: InRun = IN_RUN,
) -> CommandResult:
    """Import old runs: W&B, trackio, TensorBoard, MLflow, CSV, logs.

    A store of several runs becomes several runs, called as they are called there; --run NAME goes before these names.
    STORE#RUN is one run of it. Also read: trainer_state.json, journal entries, a table of incidents.

    Example: chronicle import wandb/ && chronicle runs

    Options:
      SOURCE…: Files or directories in order of time, or an MLflow run id.
      --as FORMAT: wandb, trackio, mlflow, tensorboard, table, log, entries, chronicle or events.
      --uri: MLflow tracking server for --as mlflow.
    """
    # which run it is may stand in the source
    going = _Importing(lambda: at.settings().paths, settings_from(at.run or "any", at.logs).logs_dir, at.run)
    for source in sources:
        going.take(source, format_name, uri)
    first, *others = going.written
    fresh = {record.get("run", first) for record in going.records if record["entry"] is not None}
    lines, events = going.lines, []
    for place in going.written.values():
        told, of_run = _scan_imported(place, is_fresh=place.run in fresh)
        lines += [f"{place.run}: {line}" for line in told] if others else told
        events += [{"run": place.run, **event} for event in of_run] if others else of_run
    if others:
        lines.append("show them with `chronicle runs`, one with `chronicle report --run NAME`")
    else:
        lines.append(f"show it with `chronicle log --graph --run {first}` or `chronicle report --run {first}`")
    return CommandResult(lines=lines, data={"run": first, "imports": going.records, "events": events})


@dataclass(slots=True)
class _Importing:
    """What was imported so far: told, recorded, and the runs that were written to."""

    only_run: Callable[[], RunPaths]
    logs: Path
    prefix: str | None
    lines: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, RunPaths] = field(default_factory=dict)

    def take(self, source: str, format_name: str | None, uri: str | None) -> None:
        """Import one source: the first runs of a store are told, all are recorded."""
        from chronicle.integrations.importing import write_import

        runs, origin = _read(source, format_name, uri)
        alone = len(runs) == 1 and (self.prefix is not None or not runs[0].is_named)
        places = [self.only_run()] if alone else _places(self.logs, runs, origin, self.prefix)
        at, points = len(self.lines), 0
        for one, place in zip(runs, places, strict=True):
            said = [part for part in (one.doubt, one.left_out and f"not imported: {one.left_out}") if part]
            done = write_import(place, one.found, origin, one.identity)
            points += done.points
            self.written[place.run] = place
            name = source if alone else f"{source} → run {place.run}"
            counts = {"entries": done.entries, "launches": done.launches, "points": done.points}
            record: dict[str, Any] = {"source": name, "format": one.found.format, "entry": done.entry_id, **counts}
            if one.identity:
                record |= {"run": place.run, "identity": one.identity, "name": one.name, "said": said}
            self.records.append(record)
            if len(self.records) <= SHOWN_RUNS:
                self.lines += [f"{name}: {_told(done, one.found.format)}", *(f"  {part}" for part in said)]
        if len(runs) > 1:
            self.lines.insert(at, f"{source}: {len(runs)} runs, {points} points ({runs[0].found.format})")


def _told(done: "Imported", form: str) -> str:
    if done.has_changed:
        return "imported before, and it has other points now: nothing changed; import it anew as another run (--run NAME)"
    if done.entry_id is None:
        return "imported before, nothing changed"
    return f"{done.entries} entries, {done.launches} launches, {done.points} points ({form})"


def _read(source: str, format_name: str | None, uri: str | None) -> "tuple[list[Tracked], Path | str]":
    """The runs of a source, and the store or file that they come from; a log is one run without an identity."""
    from chronicle.integrations.importing import read_source
    from chronicle.integrations.trackers import TRACKERS, Tracked, read_tracked
    from chronicle.metrics.readers import UnknownLog

    path, store = Path(source), Path(source.partition("#")[0])
    if format_name == "mlflow" and (uri is not None or not store.exists()):
        if uri is None:
            raise UsageProblem("--as mlflow: expected the tracking store too", "name it with --uri sqlite:///mlflow.db")
        from chronicle.integrations.mlflow import read_mlflow  # brings the report

        return [Tracked(identity="", name="", found=read_mlflow(uri, source))], source
    is_store = store.exists() and (format_name is None or format_name in TRACKERS)
    tracked = read_tracked(path, format_name) if is_store else None
    if tracked:
        return tracked, path if path.exists() else store
    try:
        found = read_source(path, format_name)
    except UnknownLog as problem:
        way_out = "`chronicle watch --once FILE` reads logs of any names that you give it"
        raise UsageProblem(problem.message, way_out) from None
    return [Tracked(identity="", name="", found=found)], path if path.exists() else source


def _places(logs: Path, tracked: "list[Tracked]", store: Path | str, prefix: str | None) -> list[RunPaths]:
    """A run directory for each run of a store, by its name there; a name that is taken twice gets its id too.

    A run that exists is written to only where it was imported from the same run before.
    """
    names = [_run_name(one.name, prefix) for one in tracked]
    names = [
        _run_name(f"{one.name}-{one.identity[:8]}", prefix) if names.count(name) > 1 else name
        for one, name in zip(tracked, names, strict=True)
    ]
    if len(set(names)) < len(names):
        names = [f"{name[:90]}-{number}" for number, name in enumerate(names, start=1)]
    places = [RunPaths(logs / name) for name in names]
    taken = [place.run for place, one in zip(places, tracked, strict=True) if not _is_free(place, one, store)]
    if taken:
        listed = ", ".join(f"`{name}`" for name in taken[:8])
        raise Refusal(
            f"{listed} in `{logs}`: a run of this name exists and was not imported from here; nothing was imported",
            "put a name before those of the store: --run NAME",
        )
    return places


def _is_free(place: RunPaths, one: "Tracked", store: Path | str) -> bool:
    from chronicle.journal import read_journal
    from chronicle.journal.events import ImportedSource, events_of

    if not place.journal_dir.is_dir():
        return True
    known = (event.path for _, event in events_of(read_journal(place).entries, ImportedSource))
    if one.is_named:  # its id is its tracker's, wherever the store lies
        return any(path.endswith(f"#{one.identity}") for path in known)
    return f"{Path(store).name}#{one.identity}" in known


def _run_name(name: str, prefix: str | None) -> str:
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-._")
    plain = f"{prefix}-{plain}" if prefix else plain
    return plain[:100] or "run"


def _scan_imported(paths: RunPaths, *, is_fresh: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """Scan what the run holds now; an import without a curve, or without a loss, has nothing to scan.

    Events of fresh points become incidents, as of a run that is watched, so that graph, picture and page mark them.
    """
    from chronicle.metrics.readers import NothingToWatch
    from chronicle.watch.scan import describe_event, scan_run
    from rollback.detect import Tier

    try:
        scan = scan_run(paths, None)
    except NothingToWatch as problem:
        return [f"not scanned: {problem.message}"], []
    if not scan.rows:
        return [], []
    loud = [event for event in scan.events if event.tier is not Tier.NOTICE]
    quiet = len(scan.events) - len(loud)
    if is_fresh:
        _mark(paths, scan.events)
    told = f"scanned: {len(scan.events)} event{'s' * (len(scan.events) != 1)}"
    told += f", {quiet} of them notices (`chronicle watch --once`)" if quiet else ""
    return [told, *(f"  {describe_event(event)}" for event in loud)], [event.to_json() for event in scan.events]


def _mark(paths: RunPaths, events: "Sequence[Event]") -> None:
    """Record events as incidents, but for one whose step the tracker's own alert names, and one that is recorded."""
    from chronicle.journal import JournalWriter, compute_lineage, read_journal
    from chronicle.journal.events import Incident, events_of
    from chronicle.watch.live import IncidentLog

    entries = read_journal(paths).entries
    lineage, known = compute_lineage(entries), {found.onset_step for _, found in events_of(entries, Incident)}
    fresh = [(event.onset_step, event) for event in events if event.onset_step is not None and event.onset_step not in known]
    if fresh:
        with JournalWriter(paths) as writer:
            for step, event in fresh:
                IncidentLog(writer, lineage.owner(step)).record(event)
