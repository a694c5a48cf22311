"""Makes `docs/commands.md` from the help texts: `python scripts/commands.py > docs/commands.md`."""

import os
import re
from collections.abc import Iterator
from typing import Any

from chronicle.cli.main import VERBS, VerbGroup
from chronicle.cli.options import ExitCode

HEAD = """# Commands

<!-- made by `python scripts/commands.py > docs/commands.md` from the help texts; a test compares -->

Every command has `--help`, with its rare options `--help-all`. Commands that only read have `--json` and print one object.
`--run NAME`, `--logs DIR` and
`--checkpoints DIR` override `chronicle.toml`; `chronicle config show` prints each setting and its origin. Data goes to
stdout, messages go to stderr. Exit codes: [exit_codes.md](exit_codes.md).
"""
SHARED = frozenset(("--run", "--logs", "--checkpoints", "--json", "--yes", "--help"))
CODES = {
    ExitCode.DONE: "done, or nothing to do",
    ExitCode.ERROR: "an error; one sentence on stderr. Also: Python would import another package in place of one of ours",
    ExitCode.USAGE: "wrong usage, a log that cannot be read as it is, "
    "or `--yes` is needed because there is no terminal; nothing was changed",
    ExitCode.REFUSED: "refused, to protect a run or a checkpoint; nothing was changed",
    ExitCode.STOPPED_PART_WAY: "stopped part-way; `chronicle recover` finishes or reverts it",
    ExitCode.FINDINGS: "findings: of `verify`, `audit` or `watch --fail`, an unsupported claim, or an outdated render",
    ExitCode.DO_NOT_REQUEUE: "only `chronicle run`: the guard or preflight refused; do not requeue",
    ExitCode.CANNOT_START: "only `chronicle run`: the launcher could not be started",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


def render_reference() -> str:
    """The page: each command, in the order of `chronicle --help`."""
    group = VerbGroup(name="chronicle", everything=True)
    lines = [HEAD]
    for verb in group.list_commands(None):
        if verb in VERBS:
            lines += _command(f"chronicle {verb}", group.get_command(None, verb))
    return "\n".join(lines).rstrip("\n") + "\n"


def render_exit_codes() -> str:
    """The table of `docs/exit_codes.md`."""
    rows = [f"| {int(code)} | {CODES[code]} |" for code in ExitCode]
    return "\n".join(["| code | means |", "|--:|---|", *rows])


def _command(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        yield f"## {name}\n\n{_text(command)}\n"
        for word in inner:
            yield from _command(f"{name} {word}", inner[word])
        return
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    own = [one for one in options if not set(one.opts) & SHARED]
    shared = sorted({word for one in options for word in one.opts} & SHARED - {"--help"})
    yield f"## {name}\n\n{_text(command)}\n"
    rows = [f"- `{_argument(one)}`: {_line(one.help)}" for one in arguments]
    rows += [f"- `{_option(one)}`: {_line(one.help)}" for one in own]
    if shared:
        rows.append("- Also " + ", ".join(f"`{word}`" for word in shared))
    if rows:
        yield "\n".join(rows) + "\n"


def _text(command: Any) -> str:
    """The help text, with its examples as code."""
    lines, code = [], False
    for line in str(command.help or "").strip().splitlines():
        found = re.match(r"\s*(Examples?):\s*(.*)", line)
        if found:
            code = found[1] == "Examples"
            lines.append(f"    {found[2]}" if found[2] else "")
        else:
            lines.append(f"    {line.strip()}" if code and line.strip() else line.strip())
    return "\n".join(lines).strip("\n")


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name).upper().strip("[]")
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    words = ", ".join([*parameter.opts, *parameter.secondary_opts])
    if getattr(parameter, "is_flag", False):
        return words
    choices = getattr(parameter.type, "choices", None)
    shown = parameter.metavar or ("|".join(map(str, choices)) if choices else str(parameter.type.name).upper())
    return f"{words} {shown}"


def _line(text: object) -> str:
    return " ".join(str(text or "").split())


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    print(render_reference(), end="")
