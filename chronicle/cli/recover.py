"""`chronicle recover`: finish or revert a transaction that was interrupted."""

from chronicle.cli.carrying_out import uninterrupted
from chronicle.cli.options import CheckpointsOption, JsonOption, LogsOption, RunOption
from chronicle.cli.recorded import settings_with_checkpoints
from chronicle.cli.result import CommandResult
from chronicle.cli.transaction import open_ground
from chronicle.cli.history import find_open_intent
from rollback.transaction.protocol import recover as finish_or_revert

__all__ = ["recover"]


def recover(
    run: RunOption = None, logs: LogsOption = None, checkpoints: CheckpointsOption = None, json: JsonOption = False
) -> CommandResult:
    """Finish an interrupted rollback or undo, or revert it when nothing had changed yet. Twice is fine.

    Example: chronicle recover
    """
    settings = settings_with_checkpoints(run, logs, checkpoints)
    with open_ground(settings, recovering=True) as ground:
        intent = find_open_intent(ground.journal.entries)
        if intent is None:
            return CommandResult(text="nothing to recover", data={"recovered": None})
        with uninterrupted():
            receipt = finish_or_revert(intent.id, intent.data, record=ground.record)
    outcome = "reverted: nothing had been changed" if receipt is None else f"finished ({receipt.id})"
    verb = intent.kind.partition(".")[0]
    data = {"recovered": intent.id, "outcome": "reverted" if receipt is None else "finished"}
    talk = (receipt.left_over,) if receipt is not None and receipt.left_over else ()
    return CommandResult(text=f"{verb} {intent.id} {outcome}", data=data, talk=talk)
