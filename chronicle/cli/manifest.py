"""`chronicle manifest`: writes the manifest of a checkpoint: names, sizes and digests of its files."""

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
    checkpoint: Annotated[str, typer.Argument(help="A path, a step or STEP@LAUNCH.", metavar="CKPT")],
    digests: Annotated[bool, typer.Option(help="Read every byte and record digests, or only names and sizes.")] = True,
    run: RunOption = None,
    logs: LogsOption = None,
    checkpoints: CheckpointsOption = None,
    json: JsonOption = False,
) -> CommandResult:
    """Write the manifest of a checkpoint: names, sizes, digests.

    If the checkpoint has a manifest already, what the run recorded in it is kept.

    Example: chronicle manifest checkpoints/opt_step-30500
    """
    chosen = checkpoint_named(checkpoint, settings_root(checkpoint, run, logs, checkpoints))
    if chosen.single_file:
        raise ChronicleError(f"`{chosen.path}` is a single file: expected a directory, which holds the manifest")
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
    """The present manifest, and a message if it cannot be read. Raises `OtherVersion` instead of replacing a newer one."""
    try:
        return read_manifest(chosen.path), ()
    except OtherVersion:
        raise
    except UnreadableFile as problem:
        return None, (f"the old manifest is lost, with what the run recorded in it: {problem.message}",)
