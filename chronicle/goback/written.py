"""A plan in a file: `chronicle rollback --plan-out` writes one, `--plan` applies it.

Only the request of the written file is used. The plan is made again from the disk and applied if both plans do the same.
So an outdated plan is refused, and a forged one can do nothing that a request cannot.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from chronicle.errors import ChronicleError
from chronicle.goback.opened import OpenedRun, read_sound_journal
from chronicle.goback.planning import ShowProgress, Target, plan
from chronicle.journal import Entry
from chronicle.journal.events import RECEIPTS, EntryKind, RollbackReceipt
from chronicle.paths import RunPaths
from chronicle.settings import Settings
from rollback.disk.content import read_bounded
from rollback.disk.durable import write_atomic
from rollback.errors import PlanRefused
from rollback.plan.plan import COMMENTS, VERSION, Plan, plan_digest
from rollback.plan.request import RollbackRequest

MAX_PLAN_BYTES = 256 * 2**20  # a plan for 512 ranks with a hundred groups each has about 50 MB
TEXTS = ("run", "root", "source")
ANEW = "make a new plan with `chronicle rollback`"


def write_plan(made: Plan, path: Path) -> None:
    """Write a plan with its digest."""
    content = made.to_json() | {"digest": made.digest}
    write_atomic(path, json.dumps(content, indent=1, default=float) + "\n")


def read_plan(path: Path) -> dict[str, Any]:
    """The written plan as JSON, with the types of the fields that are used checked."""
    try:
        record = json.loads(read_bounded(path, MAX_PLAN_BYTES))
    except OSError as problem:
        raise ChronicleError(f"cannot read the plan `{path}`: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise ChronicleError(f"`{path}` is not a plan: {problem}") from problem
    if not isinstance(record, dict) or not all(_is_text(record.get(name)) for name in TEXTS):
        raise ChronicleError(f"`{path}` is not a plan: expected an object with {', '.join(TEXTS)} and request")
    if record.get("v") != VERSION:
        raise PlanRefused(f"plan has version {record.get('v')!r}: expected version {VERSION}")
    if not isinstance(record.get("request"), dict):
        raise ChronicleError(f"`{path}` is not a plan: its request is not an object")
    if record.pop("digest", None) != plan_digest(record):
        raise PlanRefused(f"`{path}` was changed since it was written: its digest does not match", ANEW)
    return record


def with_config(settings: Settings, written: Mapping[str, Any]) -> Settings:
    """The settings, with the DeepSpeed config that a written plan edits."""
    edits = written.get("config_edits")
    first = edits[0] if isinstance(edits, list) and edits else None
    if not (isinstance(first, list) and first and _is_text(first[0])):
        return settings
    origin = {**settings.origin, "deepspeed_config": "the plan"}
    return replace(settings, deepspeed_config=Path(first[0]), origin=origin)


def find_applied(written: Mapping[str, Any], paths: RunPaths, force: str | None) -> Entry | None:
    """The receipt of this plan, where it is the last change of the run's checkpoints."""
    changes = list(read_sound_journal(paths, force).of_kind(*RECEIPTS))
    if not changes or changes[-1].kind != EntryKind.ROLLBACK_RECEIPT:
        return None
    return changes[-1] if RollbackReceipt.of(changes[-1]).plan == plan_digest(written) else None


def plan_again(written: Mapping[str, Any], opened: OpenedRun, file: Path, progress: ShowProgress) -> Plan:
    """The plan made from the disk now; raises `PlanRefused` when it does not do what the written one does."""
    run = opened.settings.run
    if str(opened.root) != written["root"] or run != written["run"]:
        raise PlanRefused(
            f"this is run `{run}` in `{opened.root}`: the plan is for run `{written['run']}` in `{written['root']}`",
            "make a new plan here with `chronicle rollback`",
        )
    opened.settings.need_checkpoints()
    request = RollbackRequest.from_json(written["request"])
    made = plan(request, opened, Target(path=Path(written["source"])), progress=progress)
    if made.digest != plan_digest(written):
        raise _other_plan(made, written, file)
    return made


def _other_plan(made: Plan, written: Mapping[str, Any], file: Path) -> PlanRefused:
    fresh = json.loads(json.dumps(made.to_json(), default=float))
    other = [name for name in fresh if name not in COMMENTS and fresh[name] != written.get(name)]
    detail = ""
    if "inputs" in other:
        recorded = written.get("inputs")
        known = {str(item) for item in recorded} if isinstance(recorded, list) else set()
        changed = [item["path"] for item in fresh["inputs"] if str(item) not in known]
        detail = f" (`{changed[0]}` changed)" if changed else ""
    return PlanRefused(
        f"`{file}` does not match the checkpoints: {', '.join(other) or 'something'} changed since it was written, on disk "
        f"or in the file{detail}",
        "plan again with `chronicle rollback --plan-out`",
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
