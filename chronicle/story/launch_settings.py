"""The settings of a launch: what it was started with and what it said of itself; and what changed between two launches.

Sources, the later ones count: config files that the command names, its arguments (`--lr 3e-4`, `lr=3e-4`), code and host, the
settings that the script recorded (`chronicle.config`, a tracker's config, `TrainingArguments`). Names are flat:
`optimizer.lr`. An argument `--lr` is called `lr`, as most scripts call it in their settings. Values are compared as values:
`3e-4` and `0.0003` are equal.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from chronicle.credentials import MASK, holds_secret, looks_secret
from chronicle.journal import Entry
from chronicle.journal.events import LaunchSettings, LaunchStart, events_of
from chronicle.paths import RunPaths
from rollback.errors import RollbackError

__all__ = [
    "FILE_SOURCE",
    "HIDDEN",
    "ChangedSetting",
    "changes_between",
    "described",
    "files_changed_between",
    "plain_settings",
    "settings_of",
]

CODE = ("code.commit", "code.changes", "code.python")
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
            "environment": start.env_digest,
            "host": start.host or None,
        }
        found.update({name: value for name, value in known.items() if value is not None})
    for source, values in by_source.items():
        if not source.startswith(FILE_SOURCE):
            found.update(_flat(values))
    return found


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[ChangedSetting]:
    """The settings that differ, in the order of their names; those of one side only are changes, too."""
    names = sorted(before.keys() | after.keys())
    pairs = [ChangedSetting(name, before.get(name), after.get(name)) for name in names]
    return [pair for pair in pairs if not _equal(pair.before, pair.after)]


def files_changed_between(paths: RunPaths, entries: Iterable[Entry], one: int, other: int) -> list[str] | None:
    """The files whose uncommitted changes differ between two launches of one commit; None where a patch was not kept."""
    from chronicle.launch.code import files_of
    from rollback.disk.content import ObjectStore

    starts = {entry.launch: start for entry, start in reversed(list(events_of(entries, LaunchStart)))}
    if one not in starts or other not in starts or starts[one].git_commit != starts[other].git_commit:
        return None
    parts = []
    for start in (starts[one], starts[other]):
        digest = start.code_patch.get("sha256")
        if start.git_dirty_digest and digest is None:
            return None
        try:
            parts.append(files_of(ObjectStore(paths.objects_dir).find(digest).read_bytes()) if digest else {})
        except (OSError, RollbackError):
            return None
    return sorted(name for name in parts[0].keys() | parts[1].keys() if parts[0].get(name) != parts[1].get(name))


def _equal(one: Any, other: Any) -> bool:
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
        named = bool(equals) and name.replace(".", "").replace("/", "").isidentifier()
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
