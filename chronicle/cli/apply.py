"""`chronicle apply`: carry out a plan that `chronicle rollback --plan-out` wrote, exactly as it was shown.

Of the file only the request is used. The plan is made anew from what lies on disk, and carried out when it comes to the
same deeds: so a plan that is out of date is refused, and one that somebody forged can do nothing that a request cannot.
"""

import json as jsonlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicle.cli.carrying_out import carry_out
from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption, YesOption, settings_from
from chronicle.cli.progress import read_every_byte
from chronicle.cli.result import CommandResult
from chronicle.errors import ChronicleError
from chronicle.journal import Entry, read_journal
from chronicle.paths import RunPaths
from chronicle.cli.transaction import open_ground
from chronicle.cli.planning import make_plan
from chronicle.settings import Settings
from rollback.disk.reading import read_bounded
from rollback.errors import PlanRefused
from rollback.plan.plan import VERSION, WORDS, Plan, digest_of
from rollback.plan.request import RollbackRequest

__all__ = ["apply"]

MAX_PLAN_BYTES = 256 * 2**20  # 512 ranks of a hundred groups each make some 50 MB


def apply(
    file: Annotated[Path, typer.Argument(help="The plan.", metavar="FILE")],
    force: Annotated[
        str | None, typer.Option("--force", help="Go on though the run seems alive; say why.", metavar="REASON")
    ] = None,
    yes: YesOption = False,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Carry out a written plan; refused when anything it was made from has changed since. Twice is done once.

    Example: chronicle apply plan.json --yes
    """
    written = _read_plan(file)
    settings = _settings(written, run, logs, checkpoints)
    done = _last_change(settings.paths)
    if done is not None and done.kind == "rollback.receipt" and done.data.get("plan") == digest_of(written):
        return CommandResult(text=f"already carried out ({done.id}): nothing to do", data={"receipt": done.id})
    with open_ground(settings, force=force, writing=yes or sys.stdin.isatty()) as ground:
        if str(ground.root) != written["root"] or settings.run != written["run"]:
            raise PlanRefused(
                f"the plan is for run `{written['run']}` in `{written['root']}`, this is run `{settings.run}` "
                f"in `{ground.root}`",
                "plan again here",
            )
        settings.need_checkpoints()
        request = RollbackRequest.from_json(written["request"])
        plan = make_plan(request, ground, path=Path(written["source"]), read=read_every_byte)
        _refuse_other_deeds(plan, written, file)
        return carry_out(plan, ground, yes=yes)


def _refuse_other_deeds(plan: Plan, written: Mapping[str, Any], file: Path) -> None:
    """Raise `PlanRefused` when the plan that fits what lies on disk is not the one that was written down."""
    if plan.digest == digest_of(written):
        return
    fresh = jsonlib.loads(jsonlib.dumps(plan.to_json(), default=float))
    other = [name for name in fresh if name not in WORDS and fresh[name] != written.get(name)]
    detail = ""
    if "inputs" in other:
        recorded = written.get("inputs")
        known = {str(item) for item in recorded} if isinstance(recorded, list) else set()
        changed = [item["path"] for item in fresh["inputs"] if str(item) not in known]
        detail = f" (`{changed[0]}` changed)" if changed else ""
    raise PlanRefused(
        f"`{file}` is not the plan that fits what lies there now: since it was written, "
        f"{', '.join(other) or 'something'} changed, there or in the file{detail}",
        "plan again with `chronicle rollback --plan-out`",
    )


def _settings(written: Mapping[str, Any], run: str | None, logs: Path | None, checkpoints: Path | None) -> Settings:
    settings = settings_from(run or written["run"], logs, checkpoints or Path(written["root"]))
    edits = written.get("config_edits")
    if isinstance(edits, list) and edits and isinstance(edits[0], list) and edits[0] and _is_text(edits[0][0]):
        settings = replace(
            settings,
            deepspeed_config=Path(edits[0][0]),
            origin={**settings.origin, "deepspeed_config": "the plan"},
        )
    return settings


def _last_change(paths: RunPaths) -> Entry | None:
    """The newest entry that changed checkpoints."""
    changes = list(read_journal(paths).of_kind("rollback.receipt", "undo.receipt", "recover.receipt"))
    return changes[-1] if changes else None


def _read_plan(path: Path) -> dict[str, Any]:
    """The written plan as JSON; what is used of it has the right types."""
    try:
        record = jsonlib.loads(read_bounded(path, MAX_PLAN_BYTES))
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ChronicleError(f"`{path}` is no plan: {problem}") from problem
    texts = ("run", "root", "source")
    if not isinstance(record, dict) or not all(_is_text(record.get(name)) for name in texts):
        raise ChronicleError(f"`{path}` is no plan: expected an object with {', '.join(texts)} and request")
    if record.get("v") != VERSION:
        raise PlanRefused(f"plan has version {record.get('v')!r}: this program carries out version {VERSION}")
    if not isinstance(record.get("request"), dict):
        raise ChronicleError(f"`{path}` is no plan: its request is no object")
    if record.pop("digest", None) != digest_of(record):
        raise PlanRefused(f"`{path}` was changed after it was planned: its digest is another", "plan again")
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
