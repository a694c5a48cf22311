"""`chronicle verify --newest`, once `chronicle latest`: the newest checkpoint that a launch can resume from.

Which one that is, `chronicle.latest` says; restarts and `bit_transformer` ask the same function.
"""

from chronicle.cli.options import AT_CHECKPOINTS, AtCheckpoints, CommandResult
from chronicle.errors import ChronicleError
from chronicle.journal import read_journal
from chronicle.latest import Latest, find_latest
from rollback.checkpoint.layout import Checkpoint
from rollback.errors import one_line


def latest(verified: bool = False, print_path: bool = False, at: AtCheckpoints = AT_CHECKPOINTS) -> CommandResult:
    """Show the newest whole checkpoint (exit 1 if there is none).

    A checkpoint that is incomplete, damaged, spoilt or of a side try is passed over, with the reason.

    Example: python train.py --resume "$(chronicle verify --newest --print-path)"

    Options:
      --verified: Only one of which every byte was read; reads it if needed.
      --print-path: Print the path alone, for scripts.
    """
    settings = at.settings(stores=True)
    root = settings.need_checkpoints()
    found = find_latest(root, read_journal(settings.paths).entries, full=verified, settings=settings)
    said = tuple(f"passed over: {_name(one.checkpoint)}: {one_line(one.reason)}" for one in found.passed_over)
    said += (found.words(),) if found.unrecognised else ()
    if found.checkpoint is None:
        what = "every byte of which can be verified" if verified else "that is whole"
        first = f"; {said[0]}" if said else ""
        raise ChronicleError(f"no checkpoint {what} in `{root}`{first}", "`chronicle verify --all` says what is wrong")
    depth = "verified (every byte read)" if found.verified else "whole (names, structure and counters; not every byte was read)"
    path = str(found.checkpoint.path)
    text = path if print_path else f"{_name(found.checkpoint)} · {depth}\n{one_line(path)}"
    return CommandResult(text=text, data=_data(found), talk=said)


def _name(one: Checkpoint) -> str:
    launch = "" if one.launch is None else f" (launch {one.launch})"
    return f"step {one.step}{launch} {one_line(one.path.name)}"


def _data(found: Latest) -> dict[str, object]:
    assert found.checkpoint is not None
    one = found.checkpoint
    return {
        "path": str(one.path),
        "step": one.step,
        "launch": one.launch,
        "format": one.format,
        "every_byte_read": found.verified,
        "passed_over": [
            {"path": str(other.path), "step": other.step, "launch": other.launch, "reason": reason}
            for other, reason, _ in found.passed_over
        ],
    }
