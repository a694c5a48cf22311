"""Makes `docs/commands.md` from the help texts: `python -m chronicle.cli.reference > docs/commands.md`."""

import os
import re
from collections.abc import Iterator
from typing import Any

from chronicle.cli.main import FOLDED, VERBS, VerbGroup
from chronicle.cli.options import ExitCode

__all__ = ["render_reference"]

HEAD = """# Commands

<!-- made by `python -m chronicle.cli.reference > docs/commands.md` from the help texts; a test compares -->

Every command has `--help`. Commands that only read have `--json` and print one object. `--run NAME`, `--logs DIR` and
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
    ExitCode.FINDINGS: "findings: of `verify`, `audit` or `spikes --fail`, an unsupported claim, or an outdated render",
    ExitCode.DO_NOT_REQUEUE: "only `chronicle run`: the guard or preflight refused; do not requeue",
    ExitCode.CANNOT_START: "only `chronicle run`: the launcher could not be started",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


def render_reference() -> str:
    """The page: each command, in the order of `chronicle --help`."""
    group = VerbGroup(name="chronicle")
    lines = [HEAD]
    for verb in (verb for verb in group.list_commands(None) if verb in VERBS):
        command = group.get_command(None, verb)
        if command is not None:
            lines += _command(f"chronicle {verb}", command)
    lines += ["## Old names\n", "They keep working and are no longer listed by `chronicle --help`.\n", "| | |\n|---|---|"]
    lines += [f"| `chronicle {verb}` | `chronicle {words}` |" for verb, (_, words) in FOLDED.items()]
    return "\n".join(lines).rstrip("\n") + "\n"


def render_exit_codes() -> str:
    """The table of `docs/exit_codes.md`."""
    rows = [f"| {int(code)} | {CODES[code]} |" for code in ExitCode]
    return "\n".join(["| code | means |", "|--:|---|", *rows])


def _command(name: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        yield f"## {name}\n"
        yield _text(command) + "\n"
        for word in inner:
            yield from _command(f"{name} {word}", inner[word])
        return
    yield f"## {name}\n"
    yield _text(command) + "\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    own = [p for p in options if not set(p.opts) & SHARED]
    shared = sorted({word for p in options for word in p.opts} & SHARED - {"--help"})
    usage = " ".join([name, *(_argument(p) for p in arguments), *(["[options]"] if options else [])])
    yield f"```text\n{usage}\n```\n"
    rows = [(_argument(p), p.help) for p in arguments] + [(_option(p), p.help) for p in own]
    if rows:
        yield "| | |\n|---|---|"
        yield from (f"| `{words}` | {_cell(text)} |" for words, text in rows)
        yield ""
    if shared:
        yield "Also: " + ", ".join(f"`{word}`" for word in shared) + ".\n"


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
    return f"{words} {shown}".replace("|", "\\|")


def _cell(text: object) -> str:
    return " ".join(str(text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    os.environ["COLUMNS"] = "120"
    print(render_reference(), end="")
