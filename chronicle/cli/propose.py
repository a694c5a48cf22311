"""`chronicle propose`: the rollback that the log and the checkpoints call for now, with the line to type."""

from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption, given_flags
from chronicle.cli.recorded import settings_with_checkpoints
from chronicle.cli.result import CommandResult
from chronicle.watch.scan import scan_run
from rollback.propose import Proposal

__all__ = ["propose"]


def propose(
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Propose which checkpoint to go back to, and why; changes nothing.

    Example: chronicle propose --run tr-190-80b
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    scan = scan_run(settings.paths, settings.checkpoints_dir, options=given_flags(logs, checkpoints))
    if scan.proposal is None:
        text = f"nothing in run `{settings.run}` calls for a rollback ({scan.rows} points to step {scan.last_step})"
        return CommandResult(text=text, data={"proposal": None, "run": settings.run})
    return CommandResult(text=describe(scan.proposal), data={"proposal": scan.proposal.to_json(), "run": settings.run})


def describe(proposal: Proposal) -> str:
    """Reasons, target, cost, alternatives, budgets, command."""
    lines = [f"why: {reason}" for reason in proposal.reasons]
    if proposal.target_step is not None:
        lines.append(f"to: {_place(proposal.target_step, proposal.cost_steps, proposal.cost_hours)}")
    lines += [f"or: {_place(other.step, other.cost_steps, other.cost_hours)}" for other in proposal.alternatives]
    lines.append(f"action: {proposal.action.value}")
    lines += [f"budget spent: {text}" for text in proposal.exhausted]
    if proposal.command is not None:
        lines.append(proposal.command)
    return "\n".join(lines)


def _place(step: int, cost_steps: int | None, cost_hours: float | None) -> str:
    hours = f", {cost_hours:.1f} h" if cost_hours is not None else ""
    return f"step {step}, discards {cost_steps} steps{hours}"
