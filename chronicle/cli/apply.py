"""`chronicle rollback --plan`: apply a plan that `chronicle rollback --plan-out` wrote.

Only the request of the written file is used. The plan is made again from the disk and applied if both plans do the same.
So an outdated plan is refused, and a forged one can do nothing that a request cannot.
"""

import json as jsonlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.cli.options import CommandResult, settings_from
from chronicle.cli.transaction import apply_and_report, open_run, read_sound_journal
from chronicle.errors import ChronicleError
from chronicle.journal import Entry
from chronicle.journal.events import RECEIPTS, EntryKind, RollbackReceipt
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.disk.content import read_bounded
from rollback.errors import PlanRefused
from rollback.plan.plan import COMMENTS, VERSION, Plan, plan_digest
from rollback.plan.request import RollbackRequest

__all__ = ["apply_file"]

MAX_PLAN_BYTES = 256 * 2**20  # a plan for 512 ranks with a hundred groups each has about 50 MB


def apply_file(
    file: Path,
    make_plan: Callable[..., Plan],
    *,
    force: str | None,
    yes: bool,
    run: str | None,
    logs: Path | None,
    checkpoints: Path | None,
) -> CommandResult:
    """Apply the plan in `file`: `make_plan` makes it again, and both must do the same. Once applied it is not applied again."""
    written = _read_plan(file)
    settings = _settings(written, run, logs, checkpoints)
    done = _last_change(settings.paths, force)
    if done is not None and done.kind == EntryKind.ROLLBACK_RECEIPT and RollbackReceipt.of(done).plan == plan_digest(written):
        return CommandResult(text=f"already applied ({done.id}): nothing to do", data={"receipt": done.id})
    with open_run(settings, force=force, writing=yes or sys.stdin.isatty()) as opened:
        if str(opened.root) != written["root"] or settings.run != written["run"]:
            raise PlanRefused(
                f"this is run `{settings.run}` in `{opened.root}`: the plan is for run `{written['run']}` "
                f"in `{written['root']}`",
                "make a new plan here with `chronicle rollback`",
            )
        settings.need_checkpoints()
        request = RollbackRequest.from_json(written["request"])
        plan = make_plan(request, opened, path=Path(written["source"]))
        _refuse_other_plan(plan, written, file)
        return apply_and_report(plan, opened, yes=yes)


def _refuse_other_plan(plan: Plan, written: Mapping[str, Any], file: Path) -> None:
    """Raise `PlanRefused` when a plan made from the disk now differs from the written one."""
    if plan.digest == plan_digest(written):
        return
    fresh = jsonlib.loads(jsonlib.dumps(plan.to_json(), default=float))
    other = [name for name in fresh if name not in COMMENTS and fresh[name] != written.get(name)]
    detail = ""
    if "inputs" in other:
        recorded = written.get("inputs")
        known = {str(item) for item in recorded} if isinstance(recorded, list) else set()
        changed = [item["path"] for item in fresh["inputs"] if str(item) not in known]
        detail = f" (`{changed[0]}` changed)" if changed else ""
    raise PlanRefused(
        f"`{file}` does not match the checkpoints: {', '.join(other) or 'something'} changed since it was written, on disk "
        f"or in the file{detail}",
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


def _last_change(paths: RunPaths, force: str | None) -> Entry | None:
    """The newest entry that changed checkpoints."""
    changes = list(read_sound_journal(paths, force).of_kind(*RECEIPTS))
    return changes[-1] if changes else None


def _read_plan(path: Path) -> dict[str, Any]:
    """The written plan as JSON, with the types of the fields that are used checked."""
    try:
        record = jsonlib.loads(read_bounded(path, MAX_PLAN_BYTES))
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ChronicleError(f"`{path}` is not a plan: {problem}") from problem
    texts = ("run", "root", "source")
    if not isinstance(record, dict) or not all(_is_text(record.get(name)) for name in texts):
        raise ChronicleError(f"`{path}` is not a plan: expected an object with {', '.join(texts)} and request")
    if record.get("v") != VERSION:
        raise PlanRefused(f"plan has version {record.get('v')!r}: expected version {VERSION}")
    if not isinstance(record.get("request"), dict):
        raise ChronicleError(f"`{path}` is not a plan: its request is not an object")
    if record.pop("digest", None) != plan_digest(record):
        raise PlanRefused(
            f"`{path}` was changed since it was written: its digest does not match",
            "make a new plan with `chronicle rollback`",
        )
    return record


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
