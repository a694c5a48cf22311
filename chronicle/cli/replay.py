"""`chronicle replay STEP`: recorded steps once more in a sandbox, compared print by print, and the verdict."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicle.cli.options import (
    CheckpointsOption,
    CommandResult,
    ExitCode,
    JsonOption,
    LogsOption,
    RunOption,
    settings_with_checkpoints,
)

if TYPE_CHECKING:
    from chronicle.replay.replay import Replay

__all__ = ["replay_step"]

CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": True}


def replay_step(
    step: Annotated[int, typer.Argument(help="The step to take again: optimizer steps completed when it was over.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="After `--`: another command than the recorded one.", metavar="[-- COMMAND]")
    ] = None,
    launch: Annotated[int | None, typer.Option(help="The launch that took it [of the lineage].", metavar="N")] = None,
    until: Annotated[int | None, typer.Option(help="Go on to this step [STEP].", metavar="STEP")] = None,
    once: Annotated[bool, typer.Option("--once", help="Never play it a second time.")] = False,
    sandbox: Annotated[
        Path | None, typer.Option(help="Where the replay writes; removed afterwards [the temporary directory].", metavar="DIR")
    ] = None,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Take a recorded step again, and name what differs.

    It begins from the nearest verified checkpoint of that launch, in a sandbox, and compares its step prints: reproduced, data
    differ, code or packages differ, state differs, hardware or race, not deterministic (docs/replay.md). Nothing of the run is
    changed but for one entry in its journal.

    Example: chronicle replay 30512 --until 30520

    Returns 0 when every step was reproduced, 5 when something differs, 1 when it could not be told.
    """
    from chronicle.replay.replay import plan_replay, record_replay, replay
    from chronicle.replay.verdict import ReplayVerdict

    settings = settings_with_checkpoints(run, logs, checkpoints)
    plan = plan_replay(settings, step, launch=launch, until=until, command=tuple(command or ()))
    found = replay(plan, sandbox=sandbox, once=once, say=_say)
    entry = record_replay(found)
    unsure = found.judged.verdict in (ReplayVerdict.NOT_TOLD, ReplayVerdict.NOT_COMPARED)
    done = found.judged.verdict is ReplayVerdict.REPRODUCED
    code = ExitCode.DONE if done else ExitCode.ERROR if unsure else ExitCode.FINDINGS
    return CommandResult(text=_text(found), data={"entry": entry.id, **entry.data}, exit_code=code)


def _text(found: "Replay") -> str:
    plan, judged = found.plan, found.judged
    begun = "its beginning" if plan.checkpoint is None else f"the checkpoint of step {plan.start}"
    last = max(found.comparison.steps, default=plan.until)
    times = "once" if found.replays == 1 else "twice"
    lines = [
        f"{judged.verdict.value}: {judged.why}",
        *(f"  {line}" for line in judged.evidence),
        f"launch {plan.launch} again from {begun}, {times}; compared to step {last}, {found.seconds:.0f} s",
    ]
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"chronicle: {line}", file=sys.stderr, flush=True)


replay_step.context_settings = CONTEXT  # type: ignore[attr-defined]
