"""`chronicle manifest`: close a checkpoint's inventory with names, sizes and digests, after verifying it."""

from typing import Annotated

import typer

from chronicle.cli.inspect import checkpoint_named, settings_root
from chronicle.cli.options import CheckpointsOption, CommandResult, JsonOption, LogsOption, RunOption
from chronicle.errors import ChronicleError
from rollback.checkpoint.layout import Checkpoint
from rollback.checkpoint.listing import refuse_strays
from rollback.checkpoint.manifest import MANIFEST_NAME, Manifest, OtherVersion, read_manifest, write_manifest
from rollback.errors import UnreadableFile

__all__ = ["manifest"]


def manifest(
    checkpoint: Annotated[str, typer.Argument(help="Checkpoint: a path, a step, or STEP@LAUNCH.", metavar="CKPT")],
    digests: Annotated[bool, typer.Option(help="Read every byte for its digest; without, names and sizes.")] = True,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write the inventory of a checkpoint into it; a manifest that is there keeps what the run recorded.

    Example: chronicle manifest checkpoints/opt_step-30500
    """
    chosen = checkpoint_named(checkpoint, settings_root(checkpoint, run, logs, checkpoints))
    if chosen.single_file:
        raise ChronicleError(f"`{chosen.path}` is a file of its own: a manifest lies inside a directory")
    refuse_strays(chosen)
    old, talk = _old_manifest(chosen)
    new = write_manifest(
        chosen.path,
        step=old.step if old and old.step is not None else chosen.step,
        memory=old.memory if old else None,
        run=old.run if old else run,
        launch=old.launch if old else None,
        digests=digests,
        more=old.more if old else None,
    )
    verb = "replaced" if old or talk else "written"
    text = f"{verb} {chosen.path / MANIFEST_NAME}: {len(new.files)} files, digests {new.digests}"
    return CommandResult(text=text, data=new.to_json(), talk=talk)


def _old_manifest(chosen: Checkpoint) -> tuple[Manifest | None, tuple[str, ...]]:
    """The manifest that is there, and what is to be said about it; one of another version is refused, not replaced."""
    try:
        return read_manifest(chosen.path), ()
    except OtherVersion:
        raise
    except UnreadableFile as problem:
        return None, (f"the manifest that was there is lost, with all that the run recorded in it: {problem.message}",)
