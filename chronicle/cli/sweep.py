"""`chronicle sweep`: end the orphans of earlier launches of a run; shows them first, ends them with `--yes`."""

import sys
import time

from chronicle.cli.options import JsonOption, LogsOption, RunOption, YesOption, settings_from
from chronicle.cli.processes import describe_elsewhere, format_found
from chronicle.cli.result import CommandResult, ExitCode
from chronicle.errors import UsageProblem
from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.admission import close_lost_launches
from chronicle.launch.orphans import Role, end_orphans, find_alive, list_launches

__all__ = ["sweep"]


def sweep(run: RunOption = None, logs: LogsOption = None, yes: YesOption = False, json: JsonOption = False) -> CommandResult:
    """End orphans of earlier launches: ours by token or record, same boot, same user; never by name.

    Example: chronicle sweep --run demo --yes
    """
    paths = settings_from(run, logs).paths
    journal = read_journal(paths)
    launches = list_launches(journal.entries)
    alive = find_alive(paths, launches)
    orphans = [one for one in alive if one.role is Role.ORPHAN]
    talk = [f"left alone, another user's: {format_found(one)}" for one in alive if one.role is Role.FOREIGN]
    talk += [f"not visible from here: {line['text']}" for line in describe_elsewhere(paths, launches, time.time())]
    listed = [one.to_json() for one in orphans]
    if not orphans:
        return CommandResult(text="no orphans", data={"orphans": [], "ended": 0, "left": []}, talk=tuple(talk))
    lines = [format_found(one) for one in orphans]
    if not yes and not _confirmed(lines):
        hint = f"chronicle sweep --run {paths.run} --yes"
        raise UsageProblem(f"{len(orphans)} orphans, nothing ended:\n" + "\n".join(lines), hint)
    report = end_orphans(paths, launches)
    left = [process.pid for process in report.left]
    with JournalWriter(paths) as writer:
        title = f"swept {len(orphans) - len(left)} orphans"
        writer.append("sweep", title=title, data={"orphans": listed, "killed": report.killed, "left": left})
        close_lost_launches(paths, read_journal(paths), writer)
    text = "\n".join([*lines, f"ended {len(orphans) - len(left)}, left {len(left)}"])
    code = ExitCode.ERROR if left else ExitCode.DONE
    data = {"orphans": listed, "ended": len(orphans) - len(left), "left": left}
    return CommandResult(text=text, data=data, exit_code=code, talk=tuple(talk))


def _confirmed(lines: list[str]) -> bool:
    """Ask on a terminal; anywhere else the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print("\n".join(lines), file=sys.stderr)
    print(f"End these {len(lines)} processes? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
