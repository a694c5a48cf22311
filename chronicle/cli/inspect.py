"""`chronicle inspect` shows what a checkpoint holds, `settings` those of a launch; each what differs between two."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.checkpoints import name_twins
from chronicle.cli.options import AT_CHECKPOINTS, IN_RUN, AtCheckpoints, CommandResult, InRun
from chronicle.errors import ChronicleError
from chronicle.story.plain import align_columns, format_size
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import list_checkpoints, list_unrecognised, read_state, say_unrecognised
from rollback.checks.inspection import GROUP_FIELDS, LR_FIELDS, summarise
from rollback.checks.leaves import Difference, compare_leaves, read_leaves
from rollback.disk import remote
from rollback.errors import UnknownFormat
from rollback.records import record_of

if TYPE_CHECKING:
    from chronicle.runs import Run
    from chronicle.story.launch_settings import Told

LABEL_WIDTH = 12
MAX_LINES = 12
MAX_NAMES = 6  # in one line


def inspect(
    checkpoint: str | None = None, other: str | None = None, all_files: bool = False, at: AtCheckpoints = AT_CHECKPOINTS
) -> CommandResult:
    """Show what a checkpoint holds, or what differs between two.

    It shows LRs, counters, RNG, data position and topology. With two checkpoints it shows every value that differs; tensors
    are compared by their bytes. Without a checkpoint, or for a directory, it lists the checkpoints there and what was not
    recognised.

    Example: chronicle inspect checkpoints/opt_step-30500

    Options:
      [CKPT]: A path, a step or STEP@LAUNCH.
      [CKPT]: Another one, to compare it with.
      --files: List every file with its role.
    """
    if checkpoint is None:
        return _listing(at.settings(stores=True).need_checkpoints())
    if other is not None:
        paths = [str(remote.local_path(one)) for one in (checkpoint, other)]
        return _compared(*(at.checkpoint(path, stores=True, count_steps=False) for path in paths))
    path = remote.local_path(checkpoint)
    try:
        chosen = at.checkpoint(str(path), stores=True, count_steps=False)
    except UnknownFormat:
        if not list_checkpoints(path, include_abandoned=False):
            raise
        return _listing(Path(path))
    summary = summarise(read_state(chosen, allow_strays=True))
    return CommandResult(lines=list(_lines(summary, all_files)), data=summary, talk=name_twins(chosen))


def _listing(root: Path) -> CommandResult:
    """Which checkpoints are in a directory, and what lies there and was not recognised as one."""
    found = list_checkpoints(root)
    unknown = list_unrecognised(root, found)
    rows = []
    for one in found:
        step = "step unknown" if one.step is None else f"step {one.step}"
        away = "" if one.abandoned is None else f"abandoned by {one.abandoned}"
        rows.append((one.path.name, one.format, step, format_size(one.size_bytes), away))
    lines = align_columns(rows) or [f"no checkpoints in {root}"]
    lines += [say_unrecognised(unknown)] * bool(unknown)
    fields = ("path", "format", "step", "size_bytes", "abandoned")
    listed = [{name: getattr(one, name) for name in fields} for one in found]
    data = {"root": root, "checkpoints": listed, "not_recognised": unknown}
    return CommandResult(lines=lines, data=data, talk=name_twins(*found))


def _lines(summary: Mapping[str, Any], all_files: bool) -> Iterator[str]:
    yield _headline(summary)
    yield ""
    for scheduler in _folded(summary["schedulers"]):
        yield from _listed("scheduler", list(_scheduler_lines(scheduler)))
    for optimizer in _folded(summary["optimizers"]):
        yield from _listed("optimizer", list(_optimizer_lines(optimizer)))
    yield from _mapping_lines("counters", _without_file(summary["counters"]))
    yield _labelled("rng", _rng(summary["rng"]))
    yield from _mapping_lines("data", summary["data"]) if summary["data"] else [_labelled("data", "no position saved")]
    yield from _mapping_lines("topology", summary["topology"])
    yield from _mapping_lines("config", summary["config"])
    yield from _listed("strays", summary["strays"])
    yield from _listed("notes", summary["notes"])
    yield from _listed("read", list(_account(summary["account"])))
    if all_files:
        yield from _listed("files", [f"{f['path']}  {f['role']}  {format_size(f['size_bytes'])}" for f in summary["files"]])


def _account(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """How far the files were read: counts and bytes of each kind, and every name of what was not."""
    counted = []
    for kind in ("read as state", "no state"):
        sizes = [row["size_bytes"] for row in rows if not row["keys"] and row["reading"] == kind]
        counted += [f"{len(sizes)} {kind} ({format_size(sum(sizes))})"] if sizes else []
    yield ", ".join(counted)
    for row in rows:
        if row["reading"] == "not read":
            place = ":".join([row["path"], ".".join(row["keys"])]).rstrip(":")
            yield f"not read: {place}  {format_size(row['size_bytes'])}, {row['why']}"


def _headline(summary: Mapping[str, Any]) -> str:
    step, ranks, files = summary["step"], summary["world_size"] or 1, summary["num_files"]
    parts = [
        summary["format"],
        "step unknown" if step is None else f"step {step} (by its {summary['step_source']})",
        "1 rank" if ranks == 1 else f"{ranks} ranks",
        f"{files} file{'s' if files != 1 else ''}, {format_size(summary['size_bytes'])}",
    ]
    if summary["launch"] is not None:
        parts.append(f"launch {summary['launch']}")
    if summary["abandoned"]:
        parts.append(f"abandoned by {summary['abandoned']}")
    return f"{Path(summary['path']).name}  {' · '.join(parts)}"


def _folded(states: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Rank shards that say the same are shown once, with their number."""
    seen: dict[str, dict[str, Any]] = {}
    for state in states:
        essence = repr({key: value for key, value in state.items() if key not in ("file", "rank", "num_states")})
        if state["rank"] is None:
            essence += state["file"]
        found = seen.setdefault(essence, {**state, "copies": 0})
        found["copies"] += 1
    yield from seen.values()


def _scheduler_lines(scheduler: Mapping[str, Any]) -> Iterator[str]:
    owner = scheduler["owner"] if scheduler["authoritative"] else f"{scheduler['owner']}, overridden"
    yield f"{_file(scheduler)}  {scheduler['class'] or 'class unknown'} · {owner}"
    state = scheduler["state"]
    count = f"   _step_count {state['_step_count']}" if "_step_count" in state else ""
    yield f"last_epoch {scheduler['last_epoch']}{count}"
    yield from (f"{field:<10} {_values(state[field])}" for field in LR_FIELDS if field in state)


def _optimizer_lines(optimizer: Mapping[str, Any]) -> Iterator[str]:
    first, last = optimizer["steps"] or (None, None)
    count = "no counters" if first is None else f"step {first}" if first == last else f"steps {first}–{last}"
    moments = f" · {', '.join(optimizer['moments'])}" if optimizer["moments"] else ""
    yield f"{_file(optimizer)}  {count} · {optimizer['num_states']} states{moments}"
    groups = optimizer["groups"]
    columns = [field for field in GROUP_FIELDS if any(group.get(field) is not None for group in groups)]
    rows = [[str(number), *(_values(group.get(column)) for column in columns)] for number, group in enumerate(groups[:16])]
    yield from align_columns([["group", *columns], *rows])
    if len(groups) > 16:
        yield f"… {len(groups)} groups"


def _file(state: Mapping[str, Any]) -> str:
    where = ".".join(map(str, state["keys"]))
    copies = f" and {state['copies'] - 1} more ranks" if state["copies"] > 1 else ""
    return f"{state['file']}{f':{where}' if where else ''}{copies}"


def _rng(rng: Mapping[str, Any]) -> str:
    ranks, digests = rng["ranks"], rng["digests"]
    if not ranks:
        return "none saved"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    alike = len(digests) - len(set(digests.values()))
    told = f"{alike} of them like another rank's" if alike else "all different"
    return f"ranks {ranks[0]}–{ranks[-1]}, {told}"


def _mapping_lines(label: str, values: Mapping[str, Any]) -> Iterator[str]:
    lines = align_columns([(key, _values(value)) for key, value in values.items()][:MAX_LINES])
    lines += [f"… and {len(values) - MAX_LINES} more (--json)"] if len(values) > MAX_LINES else []
    yield from _listed(label, lines)


def _without_file(counters: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of a single file need not repeat its name."""
    if len({name.partition(":")[0] for name in counters}) != 1:
        return dict(counters)
    return {name.partition(":")[2]: value for name, value in counters.items()}


def _listed(label: str, values: Sequence[str]) -> Iterator[str]:
    for value in values:
        yield _labelled(label, value)
        label = ""


def _labelled(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}}{text}".rstrip()


def _values(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.10g}"
    if not isinstance(value, list):
        return str(value)
    more = [f"… {len(value)}"] if len(value) > 6 else []
    return "  ".join([*map(_values, value[:6]), *more])


# --- differences of two checkpoints, of two launches


def _compared(one: Checkpoint, other: Checkpoint) -> CommandResult:
    """The values that differ between two checkpoints, and what could not be compared."""
    before, after = (read_leaves(_files_of(checkpoint), checkpoint.step) for checkpoint in (one, other))
    differences, unread = compare_leaves(before, after)
    rows = [("", one.path.name, other.path.name)]
    folded: dict[str, list[str]] = {}  # what one line says of several names
    for found in differences:
        counted = f" ({len(found.before)} of {found.num_compared})" if len(found.before) < found.num_compared else ""
        what = _what_differs(found, one.path.name, other.path.name)
        if what:
            file, colon, key = found.name.rpartition(": ")
            folded.setdefault(f"{what}{colon}{file}", []).append(key + counted)
        else:
            rows.append((found.name + counted, _one_text(found.before), _one_text(found.after)))
    num_equal = len(before.keys() | after.keys()) - len(unread) - sum(len(found.before) for found in differences)
    lines = align_columns(rows) if len(rows) > 1 else []
    lines += [f"{what}: {_first_of(names)}" for what, names in folded.items()]
    lines.append(f"{num_equal} values are equal")
    for why in dict.fromkeys(unread.values()):
        names = [name for name in unread if unread[name] == why]
        lines.append(f"not compared: {_first_of(names)}: {why}")
    data = {
        "a": str(one.path), "b": str(other.path), "differences": [record_of(found) for found in differences],
        "equal": num_equal, "not_compared": unread,
    }  # fmt: skip
    return CommandResult(lines=lines, data=data, talk=name_twins(one, other))


def _what_differs(found: Difference, before: str, after: str) -> str:
    """What is said of leaves that have no numbers to show side by side; "" for those that have."""
    if found.before == found.after:  # of the same types and shapes
        return "tensors that differ"
    if set(found.after) == {None}:
        return f"only in {before}"
    return f"only in {after}" if set(found.before) == {None} else ""


def _files_of(checkpoint: Checkpoint) -> dict[str, Path]:
    names = [file.path for file in checkpoint.files] + list(checkpoint.strays)
    paths = {name: checkpoint.folder / name for name in names}
    return {"" if path == checkpoint.path else name: path for name, path in paths.items()}


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _one_text(values: Sequence[object]) -> str:
    return _short(values[0] if len(set(values)) == 1 else _values(list(values)))


def _short(value: object) -> str:
    text = str(value) if isinstance(value, list) else _values(value)
    return text if len(text) <= 60 else text[:57] + "…"


def settings(
    named: str | None = None, other: str | None = None, changes: bool = False, at: InRun = IN_RUN
) -> CommandResult:
    """Show the settings of a launch, or what changed in them.

    With a second launch: arguments, config, environment, code and packages that differ between the two.

    Example: chronicle settings tr-190@3 --diff

    Two launches of this run: chronicle settings @3 @7

    Options:
      [RUN[@N]]: The run, and the number of a launch [the last one].
      [RUN[@N]]: Another launch, to compare it with.
      --diff: What changed since the launch before.
    """
    from chronicle.story.launch_settings import settings_of

    run, told = _launch_named(named, at)
    if other is not None:
        return _diff_launches(told, _launch_named(other, at)[1])
    if not changes:
        found = settings_of(told.entries, told.launch)
        rows = [(name, _values(value)) for name, value in sorted(found.items())]
        lines = align_columns(rows) or "no settings were recorded for this launch"
        return CommandResult(lines=lines, data={"launch": told.launch, "settings": found})
    earlier = [one.number for one in run.launches if one.number < told.launch]
    if not earlier:
        raise ChronicleError(f"launch {told.launch} is the first of run `{run.name}`: nothing to compare it with")
    return _diff_launches(told._replace(launch=earlier[-1]), told)


def _launch_named(named: str | None, at: InRun) -> tuple["Run", "Told"]:
    """(run, launch) of `RUN`, `RUN@N`, or `@N` of the run of this command; the last launch where none is named."""
    from chronicle.runs import open_launch
    from chronicle.story.launch_settings import Told

    words = named or ""
    words = at.existing().run + words if words[:1] in ("", "@") else words
    run, number = open_launch(words, logs=at.named())
    return run, Told(run.paths, run.entries, run.launch(number))


def _diff_launches(one: "Told", other: "Told") -> CommandResult:
    """What changed between the settings of two launches."""
    from chronicle.story.launch_settings import (
        ENVIRONMENT,
        changes_between,
        files_changed_between,
        packages_changed_between,
        settings_of,
    )

    before, after = (settings_of(told.entries, told.launch) for told in (one, other))
    changes = changes_between(before, after)
    equal = len(before.keys() | after.keys()) - len(changes)
    files, packages = files_changed_between(one, other), packages_changed_between(one, other)
    if packages is not None:
        changes = [change for change in changes if change.name != ENVIRONMENT] + packages
    same_run = one.paths == other.paths
    names = [str(told.launch) if same_run else f"{told.paths.run}@{told.launch}" for told in (one, other)]
    of = "launches " if same_run else ""
    lines = [change.words for change in changes]
    lines = lines or [f"no recorded setting of {of}{names[0]} and {names[1]} differs"]
    lines += [f"uncommitted changes differ in {', '.join(files)}"] if files else []
    said = [change._asdict() for change in changes]
    data: dict[str, Any] = {"a": one.launch, "b": other.launch, "changes": said, "equal": equal, "files": files}
    data |= {} if same_run else {"runs": [one.paths.run, other.paths.run]}
    talk = [f"{names[0]} → {names[1]}: {equal} recorded settings are equal"]
    if packages is None:
        talk.append("packages: their list was not kept for both launches")
    return CommandResult(lines=lines, data=data, talk=talk)
