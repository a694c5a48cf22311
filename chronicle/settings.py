"""The settings and their origin: a file (`chronicle.toml` or `[tool.chronicle]`), `CHRONICLE_*` variables, then flags.

Later ones override earlier ones. The file is searched upward from the working directory, like `.git`; its relative
paths are relative to it. When several runs exist and none is named, that is an error which lists them.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicle.errors import Refusal, SettingsError, UsageProblem
from chronicle.paths import RunPaths

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
PATH_KEYS = ("logs", "checkpoints", "deepspeed_config")
TEXT_KEYS = ("run", "mlflow_uri", "on_notice", "on_warn", "on_propose")
SWITCHES = ("utc", "batch_text")
TABLES = ("formats",)
NESTED = ("alerts", "rehearse")  # tables that are checked by those who use them
KEYS = PATH_KEYS + TEXT_KEYS + SWITCHES + TABLES + NESTED
VARIABLES = {
    "logs": "CHRONICLE_LOGS",
    "run": "CHRONICLE_RUN",
    "checkpoints": "CHRONICLE_CHECKPOINTS",
    "mlflow_uri": "CHRONICLE_MLFLOW_URI",
    "utc": "CHRONICLE_UTC",
    "batch_text": "CHRONICLE_BATCH_TEXT",
}


URL = re.compile(r"([a-z][a-z0-9+.-]+):/")  # `Path("s3://bucket/x")` is `s3:/bucket/x`


def is_url(named: str | Path) -> bool:
    """Whether this names something in an object store."""
    found = URL.match(str(named))
    return found is not None and found[1] != "file"


def refuse_store(named: str | Path) -> Refusal:
    """The refusal of a command that would have to write into a store, or follow what is there."""
    url = re.sub(r":/+", "://", str(named), count=1)
    return Refusal(
        f"`{url}` is in an object store, where this command does nothing: a store cannot exchange a whole checkpoint at once",
        "copy it to a disk, work there, and upload the result under a new prefix; "
        "`inspect`, `verify` and `status` read it where it is, and `rollback`, `undo` and `recover` "
        "work in s3:// and gs://",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a command. `origin` maps each key to where its value comes from."""

    logs_dir: Path
    run: str
    checkpoints_dir: Path | None
    checkpoints_url: str | None = None  # where the checkpoints are in a store, and this command reads none
    logs_url: str | None = None  # where `logs_dir` only shows what is in a store: nothing is written there
    mlflow_uri: str | None = None
    deepspeed_config: Path | None = None  # config of the next launch; a rollback edits its LRs too
    utc: bool = False  # times are shown in UTC, not in the local time zone
    batch_text: bool = True  # text of the first batch may stand in the journal
    formats: Mapping[str, str] = field(default_factory=dict)  # name -> regular expression of a printed line
    hooks: Mapping[str, str] = field(default_factory=dict)  # on_notice, on_warn, on_propose -> shell command
    alerts: Mapping[str, Any] = field(default_factory=dict)  # `[alerts]`, read by `chronicle.alerts`
    rehearse: Mapping[str, Any] = field(default_factory=dict)  # `[rehearse]`: whether the `first_save` of a launch is tried
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> RunPaths:
        """The paths of the run's files."""
        return RunPaths(self.logs_dir / self.run)

    def need_checkpoints(self) -> Path:
        """The checkpoints directory; raises `UsageProblem` when it is unknown or does not exist."""
        self.refuse_stores()
        if self.checkpoints_dir is None:
            raise UsageProblem(
                f"the checkpoints directory of run `{self.run}` is unknown{self._where_from()}",
                "name it with --checkpoints DIR, or `checkpoints = \"…\"` in chronicle.toml",
            )
        if not self.checkpoints_dir.is_dir():
            origin = self.origin.get("checkpoints", "default")
            raise UsageProblem(
                f"checkpoints directory `{self.checkpoints_dir}` does not exist (from {origin})",
                "name the right one with --checkpoints DIR",
            )
        return self.checkpoints_dir

    def refuse_stores(self) -> None:
        """Raise `Refusal` where the checkpoints are in a store that this command does not read; before it locks anything."""
        if self.checkpoints_url is not None:
            raise refuse_store(self.checkpoints_url)

    def say_store(self, undone: str) -> None:
        """Say on stderr what a command leaves undone because the checkpoints are in a store; it does the rest."""
        if self.checkpoints_url is not None:
            url = re.sub(":/+", "://", self.checkpoints_url, count=1)
            print(f"chronicle: the checkpoints are in `{url}`, an object store: {undone}", file=sys.stderr)

    def _where_from(self) -> str:
        origin = self.origin.get("checkpoints", "default")
        return "" if origin == "default" else f" ({origin})"


def load_settings(
    cwd: Path,
    environ: Mapping[str, str],
    *,
    run: str | None = None,
    logs: Path | None = None,
    checkpoints: Path | None = None,
    stores: bool = False,
) -> Settings:
    """The settings of a command started in `cwd`; raises `SettingsError` or `UsageProblem` with what to change.

    With `stores` (a command that only reads) logs and checkpoints in an object store are shown as local paths; without
    it logs there are refused (`Refusal`), and checkpoints where they are needed.
    """
    values: dict[str, Any] = {"logs": cwd / "logs"}
    origin = dict.fromkeys(KEYS, "default")
    _take(values, origin, *_read_file(cwd))
    _take_environment(values, origin, environ, cwd)
    flags = {"run": run, "logs": logs and _place(cwd, logs), "checkpoints": checkpoints and _place(cwd, checkpoints)}
    _take(values, origin, {key: value for key, value in flags.items() if value is not None}, "flag")
    logs_dir, logs_url = Path(values["logs"]), None
    if is_url(logs_dir):
        if not stores:
            raise refuse_store(logs_dir)
        logs_url, logs_dir = str(logs_dir), _shown(logs_dir)
    name = values.get("run")
    if name is None:
        name, origin["run"] = _only_run(logs_dir, cwd)
    if not RUN_NAME.fullmatch(name):
        raise SettingsError(
            f"run name `{name}` (from {origin['run']}): expected letters, digits, `.`, `_`, `-`, at most 100",
            "choose another with --run NAME",
        )
    if values.get("checkpoints") is None and (cwd / "checkpoints").is_dir():
        values["checkpoints"] = cwd / "checkpoints"
    found, checkpoints_url = values.get("checkpoints"), None
    if found is not None and is_url(found):
        found, checkpoints_url = (_shown(found), None) if stores else (None, str(found))
    if logs_url is not None:
        _fetch_journal(logs_dir / name)
    hooks = {key: values[key] for key in ("on_notice", "on_warn", "on_propose") if values.get(key)}
    return Settings(
        logs_dir=logs_dir,
        run=name,
        checkpoints_dir=None if found is None else Path(found),
        checkpoints_url=checkpoints_url,
        logs_url=logs_url,
        mlflow_uri=values.get("mlflow_uri"),
        deepspeed_config=values.get("deepspeed_config"),
        utc=values.get("utc") in (True, "1", "true", "yes"),
        batch_text=str(values.get("batch_text", "")).lower() not in ("0", "false", "no", "off"),
        formats=values.get("formats", {}),
        hooks=hooks,
        alerts=values.get("alerts", {}),
        rehearse=values.get("rehearse", {}),
        origin=origin,
    )


def _shown(url: Path) -> Path:
    """The local path that shows what a URL names."""
    from rollback.disk.remote import local_path  # only where something lies in a store

    return local_path(url)


def _fetch_journal(run_dir: Path) -> None:
    from rollback.disk.remote import fetch_whole

    fetch_whole(run_dir)


def _take(values: dict[str, Any], origin: dict[str, str], new: Mapping[str, Any], source: str) -> None:
    for key, value in new.items():
        values[key] = value
        origin[key] = source


def _take_environment(
    values: dict[str, Any], origin: dict[str, str], environ: Mapping[str, str], cwd: Path
) -> None:
    for key, variable in VARIABLES.items():
        if environ.get(variable):
            value = environ[variable]
            _take(values, origin, {key: _place(cwd, value) if key in PATH_KEYS else value}, variable)


def _read_file(cwd: Path) -> tuple[dict[str, Any], str]:
    for directory in (cwd, *cwd.parents):
        for name in ("chronicle.toml", "pyproject.toml"):
            path = directory / name
            if path.is_file():
                table = _parse(path)
                if name == "pyproject.toml":
                    table = table.get("tool", {}).get("chronicle")
                    if table is None:
                        continue
                return _checked(table, path), str(path)
    return {}, "default"


def settings_file(cwd: Path) -> Path | None:
    """The `chronicle.toml` that commands in this directory read; None where there is none."""
    files = (directory / "chronicle.toml" for directory in (cwd, *cwd.parents))
    return next((file for file in files if file.is_file()), None)


def _parse(path: Path) -> dict[str, Any]:
    import tomllib  # only where there is a file to read

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise SettingsError(f"cannot read `{path}`: {problem}") from problem


def _checked(table: Any, path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise SettingsError(f"unknown setting `{key}` in `{path}`: expected one of {', '.join(KEYS)}")
        if key in SWITCHES and isinstance(value, bool):
            values[key] = value
            continue
        if key in NESTED and isinstance(value, dict):
            values[key] = value
            continue
        if key in NESTED:
            raise SettingsError(f"setting `{key}` in `{path}` is {value!r}: expected a table, [{key}]")
        if key in TABLES:
            if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
                raise SettingsError(f"table `{key}` in `{path}`: expected a text for each name")
            values[key] = value
            continue
        if key in SWITCHES:
            raise SettingsError(f"setting `{key}` in `{path}` is {value!r}: expected true or false")
        if not isinstance(value, str):
            raise SettingsError(f"setting `{key}` in `{path}` is {value!r}: expected a string")
        values[key] = _place(path.parent, value) if key in PATH_KEYS else value
    return values


def _place(base: Path, value: str | Path) -> Path:
    """A path relative to `base`; a URL stays one, and that of a local file is its path."""
    found = URL.match(str(value))
    if found is None:
        return base / value
    return Path("/" + str(value)[found.end() :].lstrip("/")) if found[1] == "file" else Path(value)


INFERRED = ("the only run", "name of the working directory")  # where a run's name comes from that nobody gave


def _only_run(logs_dir: Path, cwd: Path) -> tuple[str, str]:
    runs = sorted(p.parent.name for p in logs_dir.glob("*/journal") if p.is_dir())
    if len(runs) > 1:
        listed = ", ".join(runs[:8]) + (f", … ({len(runs)} in all)" if len(runs) > 8 else "")
        raise UsageProblem(f"several runs in `{logs_dir}`: {listed}", "name one with --run NAME")
    if runs:
        return runs[0], INFERRED[0]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", cwd.name).strip("-._") or "run"
    return name[:100], INFERRED[1]
