"""`chronicle`: find the verb, run it, render its result, turn errors into one sentence and an exit code.

A verb's module is imported when it is named, so that `chronicle note` starts as fast as a hello world. The only place
that catches broadly.
"""

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from chronicle.cli.options import CommandResult, ExitCode
from chronicle.errors import ChronicleError
from chronicle_ml import ShadowedPackage, require_own
from rollback.errors import Refused, RollbackError, StoppedPartWay

__all__ = ["main"]

# verb -> module and function, in the order of `chronicle --help`
VERBS: Mapping[str, str] = {
    "init": "chronicle.cli.config:init",
    "run": "chronicle.cli.run:run",
    "status": "chronicle.cli.status:status",
    "log": "chronicle.cli.log:log",
    "show": "chronicle.cli.log:show",
    "note": "chronicle.cli.note:note",
    "close": "chronicle.cli.note:close",
    "inspect": "chronicle.cli.inspect:inspect",
    "diff": "chronicle.cli.inspect:diff",
    "verify": "chronicle.cli.verify:verify",
    "manifest": "chronicle.cli.manifest:manifest",
    "spikes": "chronicle.cli.spikes:spikes",
    "propose": "chronicle.cli.spikes:propose",
    "watch": "chronicle.cli.watch:watch",
    "rollback": "chronicle.cli.rollback:rollback",
    "apply": "chronicle.cli.rollback:apply",
    "undo": "chronicle.cli.undo:undo",
    "recover": "chronicle.cli.undo:recover",
    "prune": "chronicle.cli.prune:prune",
    "audit": "chronicle.cli.audit:audit",
    "claim": "chronicle.cli.audit:claim",
    "ps": "chronicle.cli.processes:ps",
    "sweep": "chronicle.cli.processes:sweep",
    "preflight": "chronicle.cli.preflight:preflight",
    "forensics": "chronicle.cli.forensics:forensics",
    "exclude-node": "chronicle.cli.hardware:exclude_node",
    "hardware": "chronicle.cli.hardware:hardware",
    "costs": "chronicle.cli.costs:costs",
    "render": "chronicle.cli.report:render",
    "report": "chronicle.cli.report:report",
    "serve": "chronicle.cli.report:serve",
    "export": "chronicle.cli.exchange:export",
    "import": "chronicle.cli.exchange:import_",
    "data": "chronicle.cli.data:app",
    "config": "chronicle.cli.config:app",
    "mlflow": "chronicle.cli.exchange:app",
}
# what a verb may find missing -> the extra of this package that brings it
EXTRAS: Mapping[str, str] = {
    "numpy": "train",
    "torch": "train",
    "accelerate": "train",
    "webdataset": "train",
    "deepspeed": "deepspeed",
    "mlflow": "mlflow",
    "matplotlib": "report",
    "plotly": "report",
    "scipy": "study",
    "yaml": "study",
}
GROUP = "chronicle.commands"  # entry points: `experiment` is mounted from its own package, so no import points up


class VerbGroup(TyperGroup):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs of the table in its order, then those of other packages."""
        return [*VERBS, *sorted(_plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command behind a verb, or None."""
        if cmd_name in VERBS:
            module, _, name = VERBS[cmd_name].partition(":")
            found = getattr(import_module(module), name)
            app = found if isinstance(found, typer.Typer) else _single(found, cmd_name)
        else:
            app = _plugin(cmd_name)
        if app is None:
            return None
        command = get_command(app)
        command.name = cmd_name
        return command


def _single(function: Callable[..., Any], verb: str) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    context = getattr(function, "context_settings", None)
    app.command(name=verb, context_settings=context)(function)
    return app


def _plugin(verb: str) -> Any:
    point = _plugins().get(verb)
    try:
        if point is None:
            return None
        if point.value.startswith("experiments."):
            require_own("experiments")  # a directory of that name is common beside a user's script
        return point.load()
    except ModuleNotFoundError:
        return None  # the package that brings this verb is not installed whole


@functools.cache
def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always ends the process with a documented code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    code = run(argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as problem:
        code = _say(f"cannot write to stdout: {problem.strerror}", None, ExitCode.ERROR)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Carry out one command line and print its result; returns the exit code."""
    if list(argv) in (["--version"], ["-V"]):
        from chronicle import __version__

        print(f"chronicle {__version__}")
        return ExitCode.DONE
    if os.environ.get("_CHRONICLE_COMPLETE"):  # the shell asks what could stand here
        import_module("chronicle.cli.completion").enable()
    try:
        outcome = _group().main(args=list(argv) or ["--help"], prog_name="chronicle", standalone_mode=False)
    except BaseException as problem:  # noqa: BLE001 the one broad catch: one sentence and a code, never a traceback
        return _explain(problem)
    return _render(outcome, as_json=_wants_json(argv))


def _group() -> VerbGroup:
    return VerbGroup(
        name="chronicle",
        help="Flight recorder and time machine for large training runs.",
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog="Exit codes: 0 done, 1 error, 2 usage or needs --yes, 3 refused (nothing changed), "
        "4 stopped part-way (`chronicle recover`), 5 findings present, 130 interrupted.",
    )


def _wants_json(argv: Sequence[str]) -> bool:
    """Whether `--json` stands among our own words; what follows `--` belongs to the launcher."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in own


def _render(outcome: Any, *, as_json: bool) -> int:
    if isinstance(outcome, int) and not isinstance(outcome, bool):
        if outcome == ExitCode.INTERRUPTED:  # typer turns Ctrl-C into a silent exit
            return _say("interrupted", None, ExitCode.INTERRUPTED)
        return outcome  # typer's own Exit (help shown, say)
    if not isinstance(outcome, CommandResult):
        return ExitCode.DONE
    for line in outcome.talk:
        print(_shown(line), file=sys.stderr)
    text = outcome.text
    if as_json and outcome.data is not None:
        text = json.dumps(outcome.data, indent=2, ensure_ascii=False, default=str)
    if text:
        text += "" if text.endswith("\n") else "\n"
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        pass  # `chronicle log | head`: the reader has seen enough
    except UnicodeEncodeError:  # a terminal that knows ASCII or Latin-1 only
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return int(outcome.exit_code)


def _explain(problem: BaseException) -> int:
    if isinstance(problem, SystemExit):
        return problem.code if isinstance(problem.code, int) else ExitCode.ERROR
    if isinstance(problem, KeyboardInterrupt) or type(problem).__name__ == "Abort":
        return _say("interrupted", None, ExitCode.INTERRUPTED)
    if isinstance(problem, ChronicleError):
        return _say(problem.message, problem.remedy, problem.exit_code)
    if isinstance(problem, RollbackError):
        return _say(str(problem), problem.remedy, _code_of(problem))
    if hasattr(problem, "format_message"):  # typer's usage errors
        return _say(problem.format_message(), "see `chronicle --help`", ExitCode.USAGE)
    if isinstance(problem, BrokenPipeError):
        return ExitCode.DONE
    if isinstance(problem, ShadowedPackage):
        return _say(str(problem), problem.remedy, ExitCode.ERROR)
    if isinstance(problem, OSError):
        return _say(_os_sentence(problem), None, ExitCode.ERROR)
    if isinstance(problem, MemoryError):
        return _say("out of memory", None, ExitCode.ERROR)
    missing = (problem.name or "").partition(".")[0] if isinstance(problem, ModuleNotFoundError) else ""
    if missing in EXTRAS:
        return _say(f"{missing} is not installed", f"pip install 'chronicle-ml[{EXTRAS[missing]}]'", ExitCode.ERROR)
    return _unexpected(problem)


def _code_of(problem: RollbackError) -> int:
    if isinstance(problem, StoppedPartWay):
        return ExitCode.STOPPED_PART_WAY
    return ExitCode.REFUSED if isinstance(problem, Refused) else ExitCode.ERROR


def _os_sentence(problem: OSError) -> str:
    where = f" `{problem.filename}`" if problem.filename else ""
    what = "disk full" if problem.errno == errno.ENOSPC else problem.strerror or str(problem)
    return f"{what}:{where}" if where else what


def _unexpected(problem: BaseException) -> int:
    """A defect of ours: still one sentence; the traceback on request."""
    if os.environ.get("CHRONICLE_TRACEBACK"):
        raise problem
    text = f"unexpected {type(problem).__name__}: {problem}"
    return _say(text, "this is a defect: run again with CHRONICLE_TRACEBACK=1 and report it", ExitCode.ERROR)


def _say(message: str, remedy: str | None, code: int) -> int:
    print(_shown(f"error: {message}"), file=sys.stderr)
    if remedy:
        print(_shown(f"hint: {remedy}"), file=sys.stderr)
    return int(code)


def _shown(text: str) -> str:
    """A message quotes what was typed or found: nothing in it may steer the terminal."""
    if text.replace("\n", "").isprintable():
        return text
    from chronicle.story.plain import plain_block

    return plain_block(text)


if __name__ == "__main__":
    main()
