"""Shared parts of the commands: their options, the settings of the run, and the result that a command returns.

Options that many commands have are a dataclass: `InRun`, `AtCheckpoints`, `Changing`. `spread` gives typer the options of such
a parameter one by one. `main.py` renders results for people or as JSON.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, get_origin, get_type_hints

from typer import Argument, Option

from chronicle.cli.completion import complete_runs
from chronicle.errors import ChronicleError
from chronicle.paths import RunPaths
from chronicle.settings import Settings, is_url, load_settings, refuse_store

if TYPE_CHECKING:
    from chronicle.story.plain import Coloured
    from rollback.checkpoint.layout import Checkpoint


RunOption = Annotated[str | None, Option("--run", help="Name of the run.", metavar="NAME", autocompletion=complete_runs)]
LogsOption = Annotated[Path | None, Option("--logs", help="Directory of all runs [logs].", metavar="DIR")]
CheckpointsOption = Annotated[
    Path | None, Option("--checkpoints", help="Directory in which the trainer saves checkpoints.", metavar="DIR")
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object.")]
ForceOption = Annotated[
    str | None,
    Option(
        "--force",
        help="Continue although the run seems alive or its journal is damaged, for this reason.",
        metavar="REASON",
    ),
]
YesOption = Annotated[bool, Option("--yes", "-y", help="Do not ask; needed without a terminal.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Options that several commands share; each field is one, with its help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InLogs(Given):
    """The options of a command about the runs of a directory."""

    logs: LogsOption = None
    json: JsonOption = False

    def named(self) -> Path | None:
        """The directory that was named; None where it is that of the settings."""
        return None if self.logs is None else all_runs(self.logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class InRun(InLogs):
    """The options of a command that needs a run, and not where its checkpoints are."""

    run: RunOption = None

    def settings(self, *, stores: bool = False) -> Settings:
        """The settings of this command. `stores`: it reads object stores too."""
        return settings_from(self.run, self.logs, stores=stores)

    def existing(self, *, stores: bool = False) -> Settings:
        """The settings; raises `ChronicleError` when there is no such run."""
        return need_run(self.settings(stores=stores))


@dataclass(frozen=True, slots=True, kw_only=True)
class AtCheckpoints(InRun):
    """The options of a command that works on the checkpoints of a run."""

    checkpoints: CheckpointsOption = None

    def settings(self, *, stores: bool = False) -> Settings:
        """The settings with the checkpoints directory."""
        return settings_with_checkpoints(self.run, self.logs, self.checkpoints, stores=stores)

    def flags(self) -> tuple[str, ...]:
        """The directory flags as text, for the command that is proposed."""
        return given_flags(self.logs, self.checkpoints)

    def of(self, settings: Settings) -> Self:
        """The same options, with the run and the places of these settings named."""
        return replace(self, run=settings.run, logs=settings.logs_dir, checkpoints=settings.checkpoints_dir)

    def checkpoint(self, named: str, *, stores: bool = False, count_steps: bool = True) -> "Checkpoint":
        """The checkpoint at a path, or of a step (`30500`, `30500@LAUNCH`) of the run."""
        from rollback.checkpoint.listing import list_checkpoints, open_checkpoint
        from rollback.checkpoint.select import select_checkpoint

        if is_url(named):
            raise refuse_store(named)
        step, _, launch = named.partition("@")
        if Path(named).exists() or (not step.isdigit() and "/" in named):
            return open_checkpoint(named, count_steps=count_steps)
        root = self.settings(stores=stores).need_checkpoints()
        if step.isdigit() and (not launch or launch.isdigit()):
            return select_checkpoint(list_checkpoints(root), int(step), int(launch) if launch else None, root)
        return open_checkpoint(root / named if (root / named).exists() else named, count_steps=count_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forcing(AtCheckpoints):
    """The options of a command that goes on by `--force` although the run seems alive or its journal is damaged."""

    force: ForceOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changing(Forcing):
    """The options of a command that changes checkpoints, and asks before."""

    yes: YesOption = False


# the defaults of such a parameter
IN_LOGS, IN_RUN, AT_CHECKPOINTS, FORCING, CHANGING = InLogs(), InRun(), AtCheckpoints(), Forcing(), Changing()
RARE = "\nRare options:\n"
ROW = re.compile(r"^  (\S.*?): ((?:.|\n {4,})*)", re.MULTILINE)
ORDER = ("force", "yes", "run", "logs", "checkpoints", "json")  # in which `--help` lists these options


def spread(function: Callable[..., Any], *, everything: bool = True) -> Callable[..., Any]:
    """The function of a verb as typer reads it.

    A parameter that is a `Given` becomes the options that it holds. The others are described in the docstring below
    `Options:`, one row each in their order: what is typed, a colon, the help. One with an annotation of typer has no row.
    Those below `Rare options:` are in the help only where it shows everything.
    """
    hints = get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, Given)}
    told, _, table = inspect.cleandoc(function.__doc__ or "").partition("\nOptions:\n")
    common, _, rare = table.partition(RARE)
    rows = [(*row, False) for row in ROW.findall(common)] + [(*row, not everything) for row in ROW.findall(rare)]
    plain = [name for name in signature.parameters if name not in groups]
    plain = [name for name in plain if get_origin(hints[name]) is not Annotated]
    described = {name: _typed(name, *row) for name, row in zip(plain, rows, strict=True)}
    parameters = []
    for name, parameter in signature.parameters.items():
        if name in groups:
            parameters += _options_of(groups[name], parameter.kind)
            continue
        hint = Annotated[hints[name], described[name]] if name in described else hints[name]
        parameters.append(parameter.replace(annotation=hint))

    def called(*words: Any, **given: Any) -> Any:
        for name, group in groups.items():
            named = [field.name for field in fields(group) if field.name in given]
            given[name] = group(**{option: given.pop(option) for option in named})
        return function(*words, **given)

    more = f"\n\n{len(ROW.findall(rare))} more options: --help-all" if rare and not everything else ""
    called.__doc__, called.__name__ = told.strip() + more, function.__name__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters}
    return called


def _typed(name: str, what: str, text: str, hidden: bool) -> Any:
    """An option or an argument of typer, from its row: `--to N`, `-o, --out FILE`, `[FILE]`."""
    found = " ".join(text.split())
    if not what.startswith("-"):
        return Argument(help=found, metavar=None if what == name.upper() else what)
    words = what.split(" ")
    names = [word.rstrip(",") for word in words if word.startswith("-")]
    metavar = " ".join(word for word in words if not word.startswith("-"))
    return Option(*names, help=found, metavar=metavar or None, hidden=hidden)


def _options_of(group: type[Given], kind: Any) -> list[inspect.Parameter]:
    """The options that a group holds: its own in their order, then the shared ones in that of `ORDER`."""
    hints = get_type_hints(group, include_extras=True)
    listed = sorted(fields(group), key=lambda field: ORDER.index(field.name) if field.name in ORDER else -1)
    return [inspect.Parameter(one.name, kind, default=one.default, annotation=hints[one.name]) for one in listed]


def path_text(path: Path | None) -> str | None:
    """A path as text, for JSON."""
    return None if path is None else str(path)


def given_flags(logs: Path | None, checkpoints: Path | None) -> tuple[str, ...]:
    """The directory flags of this command as text, for the command that it proposes."""
    given = (("--logs", logs), ("--checkpoints", checkpoints))
    return tuple(f"{flag} {shlex.quote(str(value))}" for flag, value in given if value is not None)


def settings_from(
    run: str | None, logs: Path | None, checkpoints: Path | None = None, *, stores: bool = False
) -> Settings:
    """The settings of this command: from files, environment variables and these flags. `stores`: it reads object stores too."""
    settings = load_settings(Path.cwd(), os.environ, run=run, logs=logs, checkpoints=checkpoints, stores=stores)
    if settings.utc:
        os.environ["CHRONICLE_UTC"] = "1"  # for this command and what it starts
    return settings


def all_runs(logs: Path | None) -> Path:
    """The directory of all runs: of the settings, without asking which run is meant."""
    return load_settings(Path.cwd(), os.environ, run="any", logs=logs).logs_dir


# --- The result of a command


class ExitCode(IntEnum):
    """The exit codes, documented in `docs/exit_codes.md`; `chronicle run` returns the launcher's own code."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    REFUSED = 3
    STOPPED_PART_WAY = 4
    FINDINGS = 5
    DO_NOT_REQUEUE = 78
    CANNOT_START = 125
    INTERRUPTED = 130


class CommandResult(NamedTuple):
    """What a command returns: `lines` for people, `talk` for stderr, `data` for `--json` (one object, or a list).

    Each line is escaped when it is printed, so a verb puts words of others into it as they are. Where one text is given, its
    line breaks stay. `raw` is for other programs: it is printed as it is, in place of the lines.
    """

    lines: "str | Sequence[str | Coloured]" = ()
    data: Mapping[str, Any] | Sequence[Any] | None = None
    exit_code: int = ExitCode.DONE
    talk: Sequence[str] = ()
    raw: str = ""

    @property
    def text(self) -> str:
        """What stands on stdout without `--json`."""
        from chronicle.story.plain import shown_lines

        return self.raw or shown_lines(self.lines)


# --- The run that a command reads


def need_run(settings: Settings) -> Settings:
    """Return the settings; raises `ChronicleError` when there is no such run, with the nearest runs when none was named."""
    if settings.paths.run_dir.is_dir():
        return settings
    if settings.origin.get("run") == "name of the working directory":
        near = nearest_runs(Path.cwd())
        hint = "start one with `chronicle init` or `chronicle run -- …`"
        if near:
            first = f"--logs {shlex.quote(os.path.dirname(near[0]))} --run {os.path.basename(near[0])}"
            hint = f"nearest: {', '.join(f'`{path}`' for path in near)}; name one with {first}"
        raise ChronicleError(f"no journal here: `{settings.logs_dir}` holds no run", hint)
    from chronicle.runs import no_such_run

    raise no_such_run(settings.paths, f" (from {settings.origin.get('run', 'default')})")


def nearest_runs(here: Path) -> list[str]:
    """Up to three run directories with a journal in children, parents and siblings, relative to `here`; the nearest first."""
    found: dict[str, None] = {}
    for directory, pattern in _near(here):
        try:
            for journal in sorted(directory.glob(pattern)):
                if journal.is_dir():
                    found[os.path.relpath(journal.parent, here)] = None
                if len(found) >= 3:
                    return list(found)
        except OSError:
            continue  # a directory that may not be listed
    return list(found)


def _near(here: Path) -> Iterator[tuple[Path, str]]:
    """(directory, pattern of journals below it): here, then each parent (three of them) and its other children."""
    yield here, "*/journal"  # inside a `logs` directory
    yield here, "*/logs/*/journal"
    for parent in list(here.parents)[:3]:
        if parent != Path(parent.anchor):
            yield parent, "journal"
            yield parent, "logs/*/journal"
            yield parent, "*/logs/*/journal"


# --- The checkpoints directory, from settings or from the journal


def settings_with_checkpoints(
    run: str | None, logs: Path | None, checkpoints: Path | None, *, stores: bool = False
) -> Settings:
    """The settings of a command that works on checkpoints, with the checkpoints directory.

    It is the configured one; else the one recorded at saves, if exactly one of those still exists; else `checkpoints`
    here. If several exist, none is chosen and `origin` names them.
    """
    settings = settings_from(run, logs, checkpoints, stores=stores)
    if settings.checkpoints_url is not None:
        return settings
    if settings.checkpoints_dir is not None and settings.origin.get("checkpoints") != "default":
        return settings
    roots = _recorded_roots(settings.paths)
    existing = [root for root in roots if root.is_dir()]
    if len(existing) == 1:
        return _with(settings, existing[0], "the journal's checkpoints")
    if not roots or settings.checkpoints_dir in existing:
        return settings
    reason = "several in the journal: " if existing else "recorded in the journal, but gone: "
    return _with(settings, None, reason + ", ".join(f"`{root}`" for root in (existing or roots)[:4]))


def _with(settings: Settings, root: Path | None, origin: str) -> Settings:
    return replace(settings, checkpoints_dir=root, origin={**settings.origin, "checkpoints": origin})


def _recorded_roots(paths: RunPaths) -> list[Path]:
    """The roots in `run.json`; those of the saves in the journal where an earlier version wrote it."""
    if not paths.journal_dir.is_dir():
        return []
    from chronicle.checkpoints import find_checkpoint_roots
    from chronicle.journal import read_journal
    from chronicle.journal.events import EntryKind
    from chronicle.journal.place import anchors_of

    try:
        roots = [Path(root) for root in anchors_of(paths).roots]
        roots = roots or [*find_checkpoint_roots(read_journal(paths).of_kind(EntryKind.CHECKPOINT), None, Path.cwd())]
    except (ChronicleError, OSError):
        return []  # the command that reads the journal reports what is wrong with it
    return list(dict.fromkeys(Path(os.path.abspath(root)) for root in roots))
