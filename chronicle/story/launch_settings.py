"""The settings of a launch: what it was started with and what it said of itself; and what changed between two launches.

Sources, the later ones count: config files that the command names, its arguments (`--lr 3e-4`, `lr=3e-4`), code and host, the
settings that the script recorded (`chronicle.config`, a tracker's config, `TrainingArguments`). Names are flat:
`optimizer.lr`; a recorded variable of the environment is `env.NCCL_ALGO`, without those that name the job itself. An argument
`--lr` is called `lr`, as most scripts call it in their settings. Values are compared as values: `3e-4` and `0.0003` are equal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from chronicle.credentials import MASK, holds_secret, looks_secret
from chronicle.journal import Entry
from chronicle.journal.events import LaunchSettings, LaunchStart, Preflight, events_of
from chronicle.paths import RunPaths
from rollback.errors import RollbackError

CODE = ("code.commit", "code.changes", "code.python")
ENVIRONMENT = "environment"  # the name of the digest of the list of packages
OUTSIDE = (ENVIRONMENT, "host")  # differ between any two launches and say little
# variables that name one job and differ between any two
OF_THE_JOB = re.compile(r"MASTER_(ADDR|PORT)|NODE_RANK|TORCHELASTIC_RUN_ID|SLURM_.*(ID|COUNT|NODELIST|NAME)")
LAUNCHER = {
    "nproc_per_node",
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_backend",
    "rdzv_id",
    "master_addr",
    "master_port",
}


STATES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
FILE_SOURCE = "file "  # of settings: a file that the command names; what the command says itself counts more
HIDDEN = "(hidden: it looks like a secret)"


class ChangedSetting(NamedTuple):
    """One setting that differs; None: not recorded there."""

    name: str
    before: Any
    after: Any

    @property
    def words(self) -> str:
        """`lr: 0.0003 → 0.0001`."""
        return f"{self.name}: {_shown(self.before)} → {_shown(self.after)}"

    @property
    def brief(self) -> str:
        """`lr 0.0003 → 0.0001`, for a line that names several."""
        return f"{self.name} {_shown(self.before)} → {_shown(self.after)}"


class ChangedSince(NamedTuple):
    """The launch before, and the settings that a launch has otherwise."""

    launch: int
    changes: Sequence[ChangedSetting]

    def brief(self, most: int) -> str:
        """The first of them, for one line."""
        more = f", {len(self.changes) - most} more" if len(self.changes) > most else ""
        return f"since launch {self.launch}: {', '.join(one.brief for one in self.changes[:most])}{more}"


def settings_of(entries: Iterable[Entry], launch: int) -> dict[str, Any]:
    """The flat settings of one launch; empty where nothing is known of it."""
    entries = list(entries)
    by_source = {said.source: said.values for entry, said in events_of(entries, LaunchSettings) if entry.launch == launch}
    found: dict[str, Any] = {}
    for source, values in by_source.items():
        if source.startswith(FILE_SOURCE):
            found.update(_flat(values))
    starts = [start for entry, start in events_of(entries, LaunchStart) if entry.launch == launch]
    for start in starts[:1]:
        found.update(plain_settings(_arguments(start.argv)))
        known = {
            "code.commit": start.git_commit,
            "code.changes": start.git_dirty_digest[:12] if start.git_dirty_digest else None,
            "code.python": start.python or None,
            ENVIRONMENT: start.env_digest,
            "host": start.host or None,
        }
        variables = {name: value for name, value in start.environment.items() if not OF_THE_JOB.fullmatch(name)}
        found.update({f"env.{name}": value for name, value in plain_settings(variables).items()})
        found.update({name: value for name, value in known.items() if value is not None})
    for source, values in by_source.items():
        if not source.startswith(FILE_SOURCE):
            found.update(_flat(values))
    return found


# how scripts call the optimizer steps of the whole run
PLANNED = ("max_steps", "max_train_steps", "num_train_steps", "train_steps", "train_iters", "max_iters")


def planned_steps(entries: Iterable[Entry], launch: int) -> int | None:
    """How many optimizer steps the whole run has by what this launch says; None where nothing or several things are said."""
    entries = list(entries)
    told = [found.facts.get("planned_steps") for entry, found in events_of(entries, Preflight) if entry.launch == launch]
    if not any(told):
        told = [value for name, value in settings_of(entries, launch).items() if name.rpartition(".")[2] in PLANNED]
    counts = {int(str(value)) for value in told if str(value).isdecimal() and int(str(value)) > 0}
    return counts.pop() if len(counts) == 1 else None


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ChangedSetting]:
    """The settings that differ, in the order of their names; those of one side only are changes, too."""
    return [ChangedSetting(name, *values) for name, values in find_differing((before, after))]


def find_differing(many: Sequence[Mapping[str, Any]]) -> list[tuple[str, tuple[Any, ...]]]:
    """The settings that differ, in the order of their names, each with its values; None where it is not recorded."""
    found = []
    for name in sorted({name for values in many for name in values}):
        values = [one.get(name) for one in many]
        if not all(_equal(values[0], value) for value in values[1:]):
            found.append((name, tuple(values)))
    return found


def changed_before(entries: Sequence[Entry], launch: int) -> ChangedSince | None:
    """What changed since the launch before this one; None where the settings of one of them are not known.

    Host and the digest of the packages are left out: they say little in a line.
    """
    started = {entry.launch for entry, _ in events_of(entries, LaunchStart)} - {None}
    earlier = max((number for number in started if number is not None and number < launch), default=None)
    if earlier is None:
        return None
    before, after = settings_of(entries, earlier), settings_of(entries, launch)
    changes = [one for one in changes_between(before, after) if one.name not in OUTSIDE]
    return ChangedSince(earlier, changes) if before and after and changes else None


class Told(NamedTuple):
    """One launch where its record lies."""

    paths: RunPaths
    entries: Sequence[Entry]
    launch: int

    @property
    def start(self) -> LaunchStart | None:
        """How its first node began; None where no entry says it."""
        return next((start for entry, start in events_of(self.entries, LaunchStart) if entry.launch == self.launch), None)

    def kept(self, digest: str) -> bytes | None:
        """An object of the run; None where it is not there."""
        from rollback.disk.content import ObjectStore

        try:
            return ObjectStore(self.paths.objects_dir).find(digest).read_bytes()
        except (OSError, RollbackError):
            return None


def files_changed_between(one: Told, other: Told) -> list[str] | None:
    """The files whose uncommitted changes differ between two launches of one commit; None where a patch was not kept."""
    from chronicle.launch.code import files_of

    starts = (one.start, other.start)
    if starts[0] is None or starts[1] is None or starts[0].git_commit != starts[1].git_commit:
        return None
    parts = []
    for told, start in zip((one, other), starts, strict=True):
        digest = start.code_patch.get("sha256") if start is not None else None
        if digest is None and start is not None and start.git_dirty_digest:
            return None
        patch = told.kept(digest) if digest else b""
        if patch is None:
            return None
        parts.append(files_of(patch) if patch else {})
    return sorted(name for name in parts[0].keys() | parts[1].keys() if parts[0].get(name) != parts[1].get(name))


def packages_changed_between(one: Told, other: Told) -> list[ChangedSetting] | None:
    """The packages whose versions differ, `package torch: 2.6.0 → 2.7.1`; None where the list of a launch was not kept."""
    lists = []
    for told in (one, other):
        start = told.start
        text = told.kept(start.env_digest) if start is not None and start.env_digest else None
        if text is None:
            return None
        pairs = (line.partition("-") for line in text.decode("utf-8", "replace").splitlines())
        lists.append({f"package {name}": version for name, _, version in pairs})
    return [change for change in changes_between(*lists) if change.before != change.after]


def _equal(one: Any, other: Any) -> bool:
    """Not recorded is another value than the text `none`."""
    if one is None or other is None:
        return one is other
    return bool(as_value(one) == as_value(other))


def as_value(given: Any) -> Any:
    """A text that is a number, true, false or none as that value; anything else as it is."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return "none"
    try:
        return float(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _arguments(argv: Iterable[str]) -> dict[str, Any]:
    """`--a 1 --b=2 c=3 --flag` as a: 1, b: 2, c: 3, flag: True. Arguments without a name are left out, the launcher's too."""
    found: dict[str, Any] = {}
    pending: str | None = None
    for word in argv:
        name, equals, value = word.lstrip("-+").partition("=")
        name = name.replace("-", "_")
        named = bool(equals) and name.replace(".", "").replace("/", "").isidentifier() and not _is_checkpoint(word)
        if pending is not None:
            is_value = not named and (not word.startswith("-") or _is_number(word))
            found[pending] = word if is_value else True
            pending = None
            if is_value:
                continue
        if named:
            found[name] = value
        elif word.startswith("--") and name:
            pending = name
    if pending is not None:
        found[pending] = True
    return {name: value for name, value in found.items() if name not in LAUNCHER}


def _is_checkpoint(word: str) -> bool:
    """Whether it is the path of a checkpoint that is named after its step, as Lightning does: `ck/epoch=0-step=10.ckpt`."""
    path, _, name = word.rpartition("/")
    return not word.startswith("-") and name.endswith(STATES) and (bool(path) or name.count("=") > 1) and "=" not in path


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


# ---- as JSON, without secrets ------------------------------------------------------------------------------------


def plain_settings(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The settings as JSON values: secrets hidden, tuples and sets as lists, other objects as 200 letters of their repr."""
    return {str(name): _plain(str(name), value, 0) for name, value in values.items()}


def _plain(name: str, value: Any, depth: int) -> Any:
    if isinstance(value, bool | int | None) or (isinstance(value, float) and value - value == 0):
        return value
    if isinstance(value, Mapping) and depth < 20:
        return {str(key): _plain(str(key), one, depth + 1) for key, one in value.items()}
    if looks_secret(name) and value not in ("", ()):
        return HIDDEN
    if isinstance(value, list | tuple | set | frozenset) and depth < 20:
        one_by_one = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_plain(name, one, depth + 1) for one in one_by_one]
    text = (
        value if isinstance(value, str) else str(value) if isinstance(value, os.PathLike | float) else described(value)
    )
    return HIDDEN if holds_secret(text) or text == MASK else text


def described(value: Any) -> str:
    """The first 200 letters of an object's repr, or the name of its class where that fails."""
    try:
        return repr(value)[:200]
    except Exception:  # noqa: BLE001 whatever an object of a stranger raises
        return type(value).__name__
