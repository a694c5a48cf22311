"""The DeepSpeed config of the next launch: named by a person, or by the command line of the newest launch. Never guessed."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from chronicle.errors import UsageProblem
from chronicle.journal import Entry
from chronicle.settings import Settings
from rollback.lr.deepspeed_config import ConfigFile
from rollback.files.json_file import MAX_CHARACTERS
from rollback.lr.infer import SchedulerClass, infer_scheduler_class
from rollback.checkpoint.state import CheckpointState

__all__ = ["find_deepspeed_config"]

# deepspeed.add_config_arguments, transformers' TrainingArguments, `accelerate launch`, and what scripts call it
OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--deepspeed_config_file", "--ds_config", "--ds-config")


def find_deepspeed_config(settings: Settings, entries: Sequence[Entry], state: CheckpointState) -> ConfigFile | None:
    """The config file that goes with a checkpoint whose scheduler is DeepSpeed's own, None where nobody has named one.

    Raises `UsageProblem` when the one that a person named cannot be read.
    """
    if not any(infer_scheduler_class(s.state) is SchedulerClass.DEEPSPEED for s in state.schedulers):
        return None
    if settings.deepspeed_config is not None:
        origin = settings.origin.get("deepspeed_config", "default")
        named = "--deepspeed-config" if origin == "flag" else origin
        return _read(settings.deepspeed_config, f"from {named}", needed=True)
    found = (_read(path, origin) for path, origin in _recorded(entries, state))
    return next((file for file in found if file is not None), None)


def _recorded(entries: Sequence[Entry], state: CheckpointState) -> Iterator[tuple[Path, str]]:
    starts = [entry for entry in entries if entry.kind == "launch.start" and entry.data.get("argv")]
    if starts:
        cwd = Path(str(starts[-1].data.get("cwd") or "/"))
        for word in _named_in([str(word) for word in starts[-1].data["argv"]]):
            yield cwd / word, f"from the command of launch {starts[-1].launch}"
        named = state.config.get("deepspeed")  # TrainingArguments keep the path that they were given
        if isinstance(named, str):
            yield cwd / named, "from training_args.bin"


def _named_in(argv: Iterable[str]) -> Iterator[str]:
    words = list(argv)
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in OPTIONS:
            value = value if equals else (words[index + 1] if index + 1 < len(words) else "")
            if value.endswith(".json"):
                yield value


def _read(path: Path, origin: str, *, needed: bool = False) -> ConfigFile | None:
    try:
        real = path.resolve(strict=True)  # the file itself is replaced, and a link to it goes on leading there
        if real.stat().st_size > MAX_CHARACTERS:
            raise UsageProblem(f"`{path}` ({origin}) is larger than {MAX_CHARACTERS} bytes: it is no DeepSpeed config")
        return ConfigFile(path=str(real), text=real.read_text(encoding="utf-8"), origin=origin)
    except (OSError, UnicodeDecodeError) as problem:
        if not needed:
            return None
        why = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise UsageProblem(f"cannot read the DeepSpeed config `{path}` ({origin}): {why}") from problem
