"""Files that name the checkpoint to load, as DeepSpeed's `latest` does: whether they lead to one (F9)."""

from __future__ import annotations

from pathlib import Path

from rollback.errors import UnreadableFile
from rollback.findings import Finding, Severity
from rollback.checkpoint.formats.pointer_file import pointer_text


def pointer_findings(folder: Path, tag: str | None, where: str, name: str = "latest") -> list[Finding]:
    """F9: `latest` in `folder` names a tag directory that is there; without it DeepSpeed starts from scratch."""
    named, problem = None, ""
    try:
        text = pointer_text(folder / name)
        named = None if text is None else text.strip()
    except UnreadableFile as found:
        problem = found.message
    except OSError:
        pass  # as if it were not there
    if problem:
        message = problem
    elif named is None:
        message = "is missing: `load_checkpoint` without a tag would return nothing and training start from scratch"
    elif not named:
        message = "is empty: a write was lost"
    elif "/" in named or named in (".", "..") or not (folder / named).is_dir():
        message = f"names `{named[:80]}`, which is no directory beside it"
    elif (folder / named).is_symlink():
        message = f"names `{named}`, a symbolic link: it may lead out of the checkpoints"
    else:
        return []
    return [
        Finding(
            check="F9",
            severity=Severity.WARN if tag is not None else Severity.ERROR,
            path=f"{where}{name}",
            message=message,
            remedy=f"write `{tag}` into it, or let `chronicle rollback` do it" if tag else None,
        )
    ]
