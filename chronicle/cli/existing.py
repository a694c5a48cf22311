"""The run that a read command is about: a name that was typed and does not exist is an error with the candidates."""

from chronicle.errors import ChronicleError
from chronicle.settings import Settings

__all__ = ["need_run"]


def need_run(settings: Settings) -> Settings:
    """The settings unchanged; raises `ChronicleError` when the run was named by someone and there is no such run."""
    if settings.paths.run_dir.is_dir() or settings.origin.get("run") == "name of the working directory":
        return settings
    known = sorted(p.parent.name for p in settings.logs_dir.glob("*/journal") if p.is_dir())
    found = ", ".join(known[:8]) if known else "no run at all"
    raise ChronicleError(
        f"no run `{settings.run}` (from {settings.origin.get('run', 'default')}) in `{settings.logs_dir}`: found {found}",
        "name another with --run NAME, or begin it with `chronicle init` or `chronicle run -- …`",
    )
