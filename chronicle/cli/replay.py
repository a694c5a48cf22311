"""`chronicle replay` takes recorded steps again in a sandbox; `chronicle bisect` finds the change that made a run go bad."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult, ExitCode
from chronicle.errors import UsageProblem
from chronicle.story.plain import say

if TYPE_CHECKING:
    from chronicle.replay.bisect import Bisect, BisectAnswer
    from chronicle.replay.replay import Replay

CONTEXT: Mapping[str, Any] = {"allow_interspersed_args": True}


def replay_step(
    step: int,
    command: list[str] | None = None,
    launch: int | None = None,
    until: int | None = None,
    recorded_code: bool = False,
    once: bool = False,
    sandbox: Path | None = None,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Take a recorded step again, and name what differs.

    It begins from the nearest verified checkpoint of that launch, in a sandbox, and compares its step prints: reproduced, data
    differ, code, packages or settings differ, state differs, not deterministic, unexplained (docs/replay.md). Nothing of the
    run is changed but for one entry in its journal.

    Example: chronicle replay 30512 --until 30520

    Returns 0 when every step was reproduced, 5 when something differs, 1 when nothing could be compared.

    Options:
      STEP: The step to take again: optimizer steps completed when it was over.
      [-- COMMAND]: After `--`: another command than the recorded one.
      --launch N: The launch that took it [of the lineage].
      --until STEP: Go on to this step [STEP].
      --recorded-code: With the commit and the uncommitted changes of that launch.
      --once: Never play it a second time.
      --sandbox DIR: Where the replay writes; removed afterwards [the temporary directory].
    """
    from chronicle.replay.replay import plan_replay, record_replay, replay
    from chronicle.replay.verdict import ReplayVerdict

    settings = at.settings()
    plan = plan_replay(settings, step, launch=launch, until=until, command=tuple(command or ()), recorded_code=recorded_code)
    found = replay(plan, sandbox=sandbox, once=once, say=say)
    entry = record_replay(found)
    unsure = found.judged.verdict is ReplayVerdict.NOT_COMPARED
    done = found.judged.verdict is ReplayVerdict.REPRODUCED
    code = ExitCode.DONE if done else ExitCode.ERROR if unsure else ExitCode.FINDINGS
    return CommandResult(text=_text(found), data={"entry": entry.id, **entry.data}, exit_code=code)


def bisect(
    command: list[str] | None = None,
    commits: str | None = None,
    steps: str | None = None,
    lr_scale: str | None = None,
    data: str | None = None,
    values: str | None = None,
    among: str | None = None,
    begin: int | None = None,
    until: int | None = None,
    launch: int | None = None,
    bad_if: str = "incident",
    judge: str = "",
    accept_unproved: str = "",
    ends_known: bool = False,
    sandbox: Path | None = None,
    at: AtCheckpoints = AT_CHECKPOINTS,
) -> CommandResult:
    """Find the change that made a run go bad, by halving.

    Each trial is a launch of the run again, from a verified checkpoint, in a sandbox, with one thing changed: the commit, the
    checkpoint, the LR, the data that is skipped, or a value in the command. About log2 n + 2 trials are needed; an
    interrupted bisect goes on where it was. Nothing of the run is changed but for entries in its journal (docs/replay.md).

    Example: chronicle bisect --commits v1.2..HEAD --until 30600

    A node of several: chronicle bisect --among n1,n2,n3,n4 --until 900 -- srun -w {} python train.py

    Returns 0 when the change was found, 1 when it could not be told.

    Options:
      [-- COMMAND]: After `--`: another command than the recorded one; {} is the value.
      --commits GOOD..BAD: Which commit of the run's repository.
      --steps GOOD..BAD: From which checkpoint on.
      --lr-scale GOOD..BAD: At which factor of the LR.
      --data FIRST..LAST: The batch of which step.
      --values A,B,…: Which value of {} is the first bad one.
      --among A,B,…: Which member makes it bad; {} is some of them.
      --from STEP: Begin at this checkpoint [the nearest verified one].
      --until STEP: A trial ends at this step [the alarm of the open incident].
      --launch N: The launch to start again [of the lineage].
      --bad-if WHAT: `incident`, `differs` (from the step prints), or as 'loss > 3.2'.
      --judge COMMAND: Shell command that judges a trial: 0 good, 125 cannot tell, else bad.
      --accept-unproved REASON: With --lr-scale: edit an LR whose place is not proved.
      --ends-known: Do not try the two ends first.
      --sandbox DIR: Where trials write; removed afterwards [the temporary directory].
    """
    from chronicle.replay.bisect import Axis, plan_bisect, run_bisect

    asked = zip(Axis, (commits, steps, lr_scale, data, values, among), strict=True)
    given = [(axis, text) for axis, text in asked if text is not None]
    if len(given) != 1:
        raise UsageProblem(f"{len(given)} axes are named: expected one of " + ", ".join(f"--{axis}" for axis in Axis))
    axis, text = given[0]
    plan = plan_bisect(
        at.settings(), axis, text,
        until=until, begin=begin, launch=launch, bad_if=bad_if, judge=judge, accept_unproved=accept_unproved,
        command=tuple(command or ()),
    )  # fmt: skip
    say(f"launch {plan.origin.launch} from {plan.origin.words} to step {plan.until}: {len(plan.candidates)} candidates")
    answer, entry = run_bisect(plan, sandbox=sandbox, ends_known=ends_known, say=say)
    found = bool(entry.data.get("found"))
    text = _bisect_text(plan, answer, entry.data["answer"])
    told = {"entry": entry.id, **entry.data, "found": found}
    return CommandResult(text=text, data=told, exit_code=ExitCode.DONE if found else ExitCode.ERROR)


def _bisect_text(plan: "Bisect", answer: "BisectAnswer", sentence: str) -> str:
    order = {one.name: place for place, one in enumerate(plan.candidates)}
    trials = sorted(answer.trials, key=lambda one: order.get(one.name, len(order)))
    width = min(40, max((len(one.name) for one in trials), default=0))
    rows = [f"  {one.name:<{width}}  {one.outcome.value:<7}  {one.why}" for one in trials]
    return "\n".join([sentence, *rows])


def _text(found: "Replay") -> str:
    plan, judged = found.plan, found.judged
    origin = plan.origin
    begun = "its beginning" if origin.checkpoint is None else f"the checkpoint of step {origin.start}"
    last = max(found.comparison.steps, default=plan.until)
    times = "once" if found.replays == 1 else "twice"
    lines = [
        f"{judged.verdict.value}: {judged.why}",
        *(f"  {line}" for line in judged.evidence),
        f"launch {origin.launch} again from {begun}, {times}; compared to step {last}, {found.seconds:.0f} s",
    ]
    return "\n".join(lines)


replay_step.context_settings = CONTEXT  # type: ignore[attr-defined]
bisect.context_settings = CONTEXT  # type: ignore[attr-defined]
