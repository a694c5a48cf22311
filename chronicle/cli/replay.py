"""`chronicle replay` takes recorded steps again in a scratch directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, ExitCode
from chronicle.story.plain import say

if TYPE_CHECKING:
    from chronicle.replay.replay import Replay

CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": True}


def replay_step(
    step: int,
    command: list[str] | None = None,
    launch: int | None = None,
    until: int | None = None,
    network: bool = False,
    scratch: Path | None = None,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Take a recorded step again, and name what differs.

    It begins from a copy of the nearest verified checkpoint of that launch, in a scratch directory, and compares its step
    prints: reproduced, data differ, code, packages or settings differ, state differs, not deterministic, unexplained
    (docs/replay.md). Where something differs and no change is known, it is played a second time. Nothing of the run is
    changed but for one entry in its journal.

    Example: chronicle replay 30512 --until 30520

    Returns 0 when every step was reproduced, 5 when something differs, 1 when nothing was compared, 3 when it is refused.

    Options:
      STEP: The step to take again: optimizer steps completed when it was over.
      [-- COMMAND]: After `--`: another command than the recorded one.
      --launch N: The launch that took it [of the lineage].
      --until STEP: Go on to this step [STEP].
      --network: The script may reach the network; else it is cut off.
      --scratch DIR: Where the replay writes; removed afterwards [the temporary directory].
    """
    from chronicle.replay.plan import plan_replay
    from chronicle.replay.replay import record_replay, replay
    from chronicle.replay.verdict import ReplayVerdict

    settings = at.settings()
    plan = plan_replay(
        settings, step, launch=launch, until=until, command=tuple(command or ()), network=network, scratch=scratch
    )
    found = replay(plan, say=say)
    entry = record_replay(found)
    unsure = found.judged.verdict is ReplayVerdict.NOT_COMPARED
    done = found.judged.verdict is ReplayVerdict.REPRODUCED
    code = ExitCode.DONE if done else ExitCode.ERROR if unsure else ExitCode.FINDINGS
    return CommandResult(lines=_lines(found), data={"entry": entry.id, **entry.data}, exit_code=code)


def _lines(found: "Replay") -> list[str]:
    plan, judged = found.plan, found.judged
    last = max(found.case.steps, default=plan.until)
    times = "once" if found.replays == 1 else "twice"
    return [
        f"{judged.verdict.value}: {judged.why}",
        *(f"  {line}" for line in judged.evidence),
        f"launch {plan.launch} again from {plan.words}, {times}; compared to step {last}, {found.seconds:.0f} s",
    ]


replay_step.context_settings = CONTEXT  # type: ignore[attr-defined]
