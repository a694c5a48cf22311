"""What a script says about itself: `chronicle.log(step, loss=…)`, `config`, `note`, `alert`. No torch.

Under `chronicle run` numbers go to the launch's `metrics.jsonl`, words and settings to the run's journal. Elsewhere nothing is
written, and one line on stderr says so. Numbers and settings are written by the main rank; the other ranks' calls do nothing.
Nothing here raises into a training: what cannot be recorded is said once on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.journal.events import Incident, JournalEvent, LaunchSettings, Note
from chronicle.journal.writer import JournalWriter
from chronicle.launch.ranks import rank_of
from chronicle.metrics.log import MetricsWriter, heard, number_of
from chronicle.paths import RunPaths
from chronicle.story.launch_settings import described, plain_settings

TIERS = ("notice", "warn", "propose")
MAX_CONFIG_BYTES = 65_536


class Recording:
    """What one process records in its launch. Made by `start`; `run` is None outside `chronicle run`."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        directory, run_dir = environ.get("CHRONICLE_LAUNCH_DIR"), environ.get("CHRONICLE_RUN_DIR")
        number = environ.get("CHRONICLE_LAUNCH", "")
        self.run = environ.get("CHRONICLE_RUN") if directory and run_dir else None
        self.launch = int(number) if number.isdigit() else None
        self.rank = rank_of(environ) or 0
        self._metrics_path = Path(directory) / "metrics.jsonl" if directory and self.run is not None else None
        self._paths = RunPaths(Path(run_dir)) if run_dir and self.run is not None else None
        self._metrics: MetricsWriter | None = None
        self._journal: JournalWriter | None = None
        self._is_log_over = False
        self._said: set[str] = set()
        self._settings: dict[str, dict[str, Any]] = {}  # source -> what it said so far

    def log(self, step: int, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Append one line to the launch's per-step log. `step`: optimizer steps completed.

        Values are numbers or what `float()` takes (a tensor of one element); NaN and infinity are recorded as such. Names with
        a slash go into a mapping: `log(step, {"train/loss": loss})`. What is no number is left out, and said once.
        """
        if self._metrics_path is None:
            self._hint()
            return
        if self.rank:  # the log is the first rank's; the step prints of this one note its loss
            for hear in heard:
                hear(step, {**values, **more} if values else more)
            return
        if self._is_log_over:
            return
        try:
            if self._metrics is None:
                self._metrics = MetricsWriter(self._metrics_path)
            self._metrics.write(step, {**values, **more} if values else more)
        except OSError as problem:
            self._is_log_over = True
            self._say("log", f"the per-step log stops here ({problem}); training continues")
        except Exception:  # noqa: BLE001 whatever an object of a stranger raises
            self._log_numbers(step, values, more)

    def config(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Record settings of this launch; later calls add to them. Values: whatever JSON holds, anything else as its `repr`.

        A value that looks like a secret is hidden; more than 64 KiB are not recorded, and that is said.
        """
        if self._paths is None:
            self._hint()
        self.add_settings("the script", {} if values is None else values, more)

    def add_settings(self, source: str, *values: Mapping[Any, Any]) -> None:
        """Record settings under a source of their own (`TrainingArguments`); nothing is said outside a launch."""
        if self._paths is None or self.rank:
            return
        known = self._settings.get(source, {})
        try:
            given = {name: value for one in values for name, value in plain_settings(one).items()}
            merged = {**known, **given}
            size = len(json.dumps(merged))
        except Exception as problem:  # noqa: BLE001 whatever an object of a stranger raises
            self._say(f"config {source}", f"settings of {source} not recorded ({type(problem).__name__}: {problem})")
            return
        if size > MAX_CONFIG_BYTES:
            text = f"settings of {source} are larger than {MAX_CONFIG_BYTES} bytes: {', '.join(list(given)[:5])} not recorded"
            self._say(f"config {source}", text)
        elif merged != known:
            self._settings[source] = merged
            event = LaunchSettings(values=merged, source=source)
            title = f"settings of {source}: {', '.join(merged)}"
            self._write(event, title=title if len(title) <= 200 else f"{title[:198].rpartition(',')[0]}, …")

    def note(self, text: str, *, step: int | None = None, tags: tuple[str, ...] = ()) -> None:
        """Write a note into the journal; the first line is its title. Any rank may."""
        if self._paths is None:
            self._hint()
            return
        title, _, body = _text(text).strip().partition("\n")
        self._write(Note(text=body.strip(), tags=tuple(tags)), title=title, step=step)

    def alert(self, text: str, *, tier: str = "warn", step: int | None = None) -> None:
        """Record an incident, which stays open until it is closed. `tier`: notice, warn or propose. Any rank may."""
        if self._paths is None:
            self._hint()
            return
        if tier not in TIERS:
            self._say(
                f"tier {tier}", f"the tier of an alert is `{tier}`: expected {', '.join(TIERS)}; `warn` is recorded"
            )
            tier = "warn"
        title, _, body = _text(text).strip().partition("\n")
        event = Incident(text=body.strip(), kind="alert", tier=tier, status="open", onset_step=step, tags=("alert",))
        self._write(event, title=title, step=step)

    def close(self) -> None:
        """Close the files; a later call opens them again."""
        for opened in (self._metrics, self._journal):
            if opened is not None:
                opened.close()
        self._metrics = self._journal = None

    def _log_numbers(self, step: Any, values: Mapping[str, Any] | None, more: Mapping[str, Any]) -> None:
        """The slow path: some name or value, or the step, is not what it should be."""
        try:
            given = {str(name): number_of(value) for name, value in [*(values or {}).items(), *more.items()]}
        except Exception as problem:  # noqa: BLE001 whatever an object of a stranger raises
            self._say("log values", f"log: a line is left out ({type(problem).__name__}: {problem})")
            return
        whole = number_of(step)
        if whole is None or not whole.is_integer():
            said = f"log: the step is {described(step)}: expected a whole number of optimizer steps"
            self._say("step", f"{said}; such lines are left out")
            return
        numbers = {name: number for name, number in given.items() if number is not None and name not in ("step", "t")}
        left_out = [name for name in given if name not in numbers]
        if left_out:
            self._say("log values", f"log: no numbers, left out: {', '.join(f'`{name}`' for name in left_out[:5])}")
        if numbers and self._metrics is not None:
            try:
                self._metrics.write(int(whole), numbers)
            except OSError as problem:
                self._say("log", f"a line of the per-step log was lost ({problem}); training continues")

    def _write(self, event: JournalEvent, *, title: str, step: int | None = None) -> None:
        assert self._paths is not None
        try:
            if self._journal is None:
                self._journal = JournalWriter(self._paths)
            self._journal.write(event, step=step, launch=self.launch, title=title)
        except (ChronicleError, OSError, TypeError, ValueError) as problem:
            self._say("journal", f"not recorded: {title[:60]!r} ({problem}); training continues")

    def _hint(self) -> None:
        if self.run is None:
            self._say("outside", "nothing is recorded: this process was not started by `chronicle run -- …`")

    def _say(self, topic: str, text: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            print(f"chronicle: {text}", file=sys.stderr, flush=True)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 whatever an object of a stranger raises
        return type(value).__name__


# ---- of this process -------------------------------------------------------------------------------------------------

_recording: Recording | None = None


def start() -> Recording:
    """The recording of this process, made at the first call. `chronicle.log` and the others are its methods."""
    global _recording
    if _recording is None:
        _recording = Recording()
    return _recording
