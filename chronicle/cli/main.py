"""The entry point of `chronicle`: finds the command, runs it, prints its result or one error sentence with an exit code.

The module of a command is imported when that command is called, so that `chronicle note` starts fast. Exceptions of
every class are caught here, and nowhere else in the commands.
"""

import difflib
import errno
import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from chronicle.cli.options import CommandResult, ExitCode, spread
from chronicle.errors import ChronicleError, Declined, RunCopied, UsageProblem
from chronicle_ml import ShadowedPackage, require_own
from rollback.errors import RollbackError, StoreFailed

# title -> verb -> (module and function, summary). `chronicle --help` prints it without importing the modules; the summary
# is the first line of the command's own help, which a test compares.
GROUPS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Every day": {
        "run": ("chronicle.cli.run:run_launcher", "Start a training command under supervision."),
        "status": ("chronicle.cli.status:show_status", "Show where the run is, what is open and what to do next."),
        "log": ("chronicle.cli.log:log", "List the journal, newest entry first, or draw it as a graph."),
        "rollback": ("chronicle.cli.rollback:rollback", "Go back to a checkpoint, and change its LR if asked."),
        "undo": ("chronicle.cli.undo:undo_rollback", "Undo the last rollback, or what `undo --list` names."),
        "note": ("chronicle.cli.note:note", "Write a note, or the outcome of an open entry."),
        "compare": ("chronicle.cli.runs:show_comparison", "Compare runs: values at equal steps, settings that differ."),
        "report": ("chronicle.cli.report:write_report", "Write the run as one HTML page, or its story as Markdown."),
    },
    "Record": {
        "init": ("chronicle.cli.init:init", "Create the journal of a run and a `chronicle.toml`."),
        "import": ("chronicle.cli.importing:import_", "Import old runs: W&B, trackio, TensorBoard, MLflow, CSV, logs."),
    },
    "Look": {
        "show": ("chronicle.cli.log:show", "Show one journal entry and the entries it is linked to."),
        "watch": ("chronicle.cli.watch:watch", "Find spikes and divergences in a run or a log, live or --once."),
        "costs": ("chronicle.cli.costs:costs", "Show goodput, lost steps and lost hours by cause."),
        "runs": ("chronicle.cli.runs:runs", "List the runs of a directory with state, step and last values."),
        "settings": ("chronicle.cli.inspect:settings", "Show the settings of a launch, or what changed in them."),
    },
    "Check": {
        "inspect": ("chronicle.cli.inspect:inspect", "Show what a checkpoint holds, or what differs between two."),
        "verify": ("chronicle.cli.verify:verify_checkpoints", "Verify checkpoints, or find the newest (exit 5 on findings)."),
        "preflight": ("chronicle.cli.preflight:preflight", "Check a launch before it spends GPU hours."),
        "rehearse": ("chronicle.cli.rehearse:rehearse", "Prove that a script can be killed and resumed."),
        "replay": ("chronicle.cli.replay:replay_step", "Take a recorded step again, and name what differs."),
        "audit": ("chronicle.cli.audit:audit", "Check the journal, logs, attachments, manifests and claims."),
    },
    "Operate": {
        "recover": ("chronicle.cli.undo:recover_transaction", "Finish or revert an interrupted rollback or undo."),
        "ps": ("chronicle.cli.processes:ps", "List the living processes of a run, or end its orphans."),
        "prune": ("chronicle.cli.prune:prune", "Delete what rollbacks moved aside and no undo needs."),
    },
    "Tell": {
        "serve": ("chronicle.cli.report:serve", "Serve the run's page on 127.0.0.1 until Ctrl-C."),
        "export": ("chronicle.cli.exchange:export", "Export the metrics of the lineage, each step once."),
    },
}
# Rarely typed, or typed by scripts: `chronicle --help` only names them, `chronicle help all` shows their summaries too.
ADVANCED: Mapping[str, tuple[str, str]] = {
    "alerts": ("chronicle.cli.alerts:alerts", "Show where alerts go; send a test, or send what waits."),
    "use": ("chronicle.cli.config:use", "Let the commands in this directory act on another run."),
    "config": ("chronicle.cli.config:app", "Show the settings, or print the shell completion script."),
    "hardware": ("chronicle.cli.hardware:hardware", "Record hardware events; exclude a node, or readmit it."),
    "data": ("chronicle.cli.data:app", "Build, verify and account for training data."),
    "claim": ("chronicle.cli.audit:claim", "Judge what will be published against recorded facts."),
    "mcp": ("chronicle.cli.mcp:mcp", "Serve runs to an agent over MCP: it reads, notes and proposes."),
    "mlflow": ("chronicle.cli.exchange:app", "Copy the run into MLflow."),
    "skill": ("chronicle.cli.skill:skill", "Print the skill for agents that watch runs, or install it."),
    "again": ("chronicle.cli.again:go_on_or_stop", "Ask whether a SLURM job goes on after its last launch."),
}
OLD_NAMES: Mapping[str, str] = {  # what stands for them today: they keep working
    "apply": "rollback --plan",
    "close": "note --close",
    "diff": "inspect",
    "exclude-node": "hardware --exclude",
    "latest": "verify --newest --quick",
    "manifest": "verify --write",
    "propose": "watch --once",
    "render": "report --markdown",
    "spikes": "watch --once",
    "sweep": "ps --sweep",
}
SHOWN: Mapping[str, str] = {verb: target for group in GROUPS.values() for verb, (target, _) in group.items()}
VERBS: Mapping[str, str] = {**SHOWN, **{verb: target for verb, (target, _) in ADVANCED.items()}}
# optional package -> the extra that installs it
EXTRAS: Mapping[str, str] = {
    "numpy": "train",
    "torch": "train",
    "accelerate": "train",
    "webdataset": "train",
    "deepspeed": "deepspeed",
    "mlflow": "mlflow",
    "mcp": "mcp",
    "matplotlib": "report",
    "scipy": "study",
    "statsmodels": "study",
    "tensorboard": "tensorboard",
    "yaml": "study",
}
PLUGINS: Mapping[str, str] = {"experiment": "Run controlled studies of what a restart does to a run."}
ENTRY_POINTS = "chronicle.commands"  # commands of other packages; `experiments` adds one without being imported here


class VerbGroup(TyperGroup):
    """The group of all commands; each is imported when it is called."""

    def __init__(self, *arguments: Any, everything: bool = False, **named: Any) -> None:
        """`everything`: the help shows advanced verbs with their summaries, old names, and rare options."""
        super().__init__(*arguments, **named)
        self.everything = everything

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs of the tables in their order, then those of other packages; old names are not listed."""
        return [*SHOWN, *ADVANCED, *sorted(_plugins())]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their summaries, one section per group of `GROUPS`."""
        advanced = {verb: summary for verb, (_, summary) in ADVANCED.items()}
        advanced |= {verb: PLUGINS.get(verb, "") for verb in _plugins()}
        sections = {title: [(verb, row[1]) for verb, row in commands.items()] for title, commands in GROUPS.items()}
        if self.everything:
            sections["Advanced"] = sorted(advanced.items())
            sections["Old names, which keep working"] = [(verb, f"chronicle {words}") for verb, words in OLD_NAMES.items()]
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:<12}", said) for verb, said in rows])
        if self.everything:
            return
        with formatter.section("Advanced (`chronicle help all` says what they do)"):
            formatter.write_text(", ".join(sorted(advanced)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names; an unknown name is answered with the nearest ones."""
        if args and args[0] not in VERBS and not args[0].startswith("-") and args[0] not in _plugins():
            near = difflib.get_close_matches(args[0], [*SHOWN, *ADVANCED, "help"], n=2)
            hint = f"did you mean {' or '.join(f'`chronicle {verb}`' for verb in near)}?" if near else "see `chronicle --help`"
            raise UsageProblem(f"no command `{args[0]}`", hint)
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, or None."""
        if cmd_name in VERBS:
            module, _, name = VERBS[cmd_name].partition(":")
            found = getattr(import_module(module), name)
            gc.enable()  # off since the start of the process (`chronicle_ml.main`)
            app = found if isinstance(found, typer.Typer) else self._single(found, cmd_name)
        else:
            app = _plugin(cmd_name)
        if app is None:
            return None
        command = get_command(app)
        command.name = cmd_name
        return command

    def _single(self, function: Callable[..., Any], verb: str) -> typer.Typer:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        context = getattr(function, "context_settings", None)
        app.command(name=verb, context_settings=context)(spread(function, everything=self.everything))
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
        return None  # the package of this command is installed without its own requirements


def judge_runs(arms: tuple[str, str], differences: Mapping[int, float], margin: float) -> tuple[str, dict[str, Any]] | None:
    """The studies' verdict on two arms of runs (`experiments.verdicts.judge_runs`); None where they are not installed."""
    if _plugin("experiment") is None:
        return None
    package = _plugins()["experiment"].module.partition(".")[0]
    found: tuple[str, dict[str, Any]] = import_module(f"{package}.verdicts").judge_runs(arms, differences, margin)
    return found


@functools.cache
def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


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
    """Run one command line and print its result; returns the exit code."""
    if argv and argv[0] == "help":
        argv = ["--help-all"] if list(argv[1:2]) == ["all"] else [*argv[1:2], "--help"]
    everything = "--help-all" in _own(argv)
    argv = ["--help" if word == "--help-all" and everything else word for word in argv]
    if argv and argv[0] in OLD_NAMES:
        verb, *options = OLD_NAMES[argv[0]].split()
        argv = [verb, "--help"] if argv[1:2] in (["--help"], ["-h"]) else [verb, *options, *argv[1:]]
    if list(argv) in (["--version"], ["-V"]):
        from chronicle import __version__

        print(f"chronicle {__version__}")
        return ExitCode.DONE
    if os.environ.get("_CHRONICLE_COMPLETE"):  # the shell asks for completions
        import_module("chronicle.cli.completion").enable()
    try:
        group = _group(everything=everything)
        outcome = group.main(args=list(argv) or ["--help"], prog_name="chronicle", standalone_mode=False)
        if (stores := _stores()) is not None:
            stores.refuse_changed()
    except RunCopied as problem:
        try:
            return run(argv) if _declare(problem) else explain(problem)
        except Declined as answer:
            return explain(answer)
    except BaseException as problem:  # noqa: BLE001 every error becomes one sentence and an exit code
        return explain(problem)
    return _render(outcome, as_json="--json" in _own(argv))


def _declare(problem: RunCopied) -> bool:
    """Ask on a terminal whether a copied run directory is the run or a fork, and record the answer; True to go on.

    Raises `Declined` when the answer is neither.
    """
    if not sys.stdin.isatty():
        return False
    print(problem.message, file=sys.stderr)
    answer = str(typer.prompt("the same run, (m)oved, a (f)ork of its own, or (n)othing?", default="n", err=True)).lower()
    logs, name = os.path.split(problem.run_dir)
    declared = {"m": ["--moved"], "f": ["--fork-of", problem.origin]}.get(answer[:1])
    if declared is None:
        raise Declined
    return run(["init", *declared, "--run", name, "--logs", logs]) == ExitCode.DONE


def _group(*, everything: bool = False) -> VerbGroup:
    return VerbGroup(
        everything=everything,
        name="chronicle",
        help="Flight recorder and time machine for large training runs.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 done, 1 error, 2 usage or needs --yes, 3 refused (nothing changed), "
        "4 stopped part-way (`chronicle recover`), 5 findings present, 130 interrupted.",
    )


def _own(argv: Sequence[str]) -> Sequence[str]:
    """Our own arguments; those after `--` belong to the launcher."""
    return argv[: argv.index("--")] if "--" in argv else argv


def _render(outcome: Any, *, as_json: bool) -> int:
    if isinstance(outcome, int) and not isinstance(outcome, bool):
        if outcome == ExitCode.INTERRUPTED:  # typer turns Ctrl-C into a silent exit
            return _say("interrupted", None, ExitCode.INTERRUPTED)
        return outcome  # typer's own exit, for example after --help
    if not isinstance(outcome, CommandResult):
        return ExitCode.DONE
    stores = _stores()
    for line in (*outcome.talk, *(() if stores is None else stores.notes())):
        print(_shown(line), file=sys.stderr)
    if as_json and outcome.data is not None:
        text = json.dumps(outcome.data, indent=2, ensure_ascii=False, default=str)
    else:
        text = outcome.text
    if text:
        text += "" if text.endswith("\n") else "\n"
        text = text if stores is None else stores.shown(text)
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        pass  # `chronicle log | head` closes the pipe early
    except UnicodeEncodeError:  # a terminal with ASCII or Latin-1 encoding
        sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    return int(outcome.exit_code)


def explain(problem: BaseException) -> int:
    """Say an error in one sentence; its exit code."""
    name = type(problem).__name__
    if isinstance(problem, SystemExit):
        return problem.code if isinstance(problem.code, int) else ExitCode.ERROR
    if isinstance(problem, KeyboardInterrupt) or name == "Abort":
        return _say("interrupted", None, ExitCode.INTERRUPTED)
    if isinstance(problem, BrokenPipeError):
        return ExitCode.DONE
    if isinstance(problem, Declined):
        print("nothing was changed", file=sys.stderr)
        return ExitCode.DONE
    if name == "NoArgsIsHelpError":  # `chronicle data`: its help, as `chronicle` alone prints its own
        print(problem)
        return ExitCode.DONE
    if isinstance(problem, ChronicleError | RollbackError | StoreFailed | ShadowedPackage):
        return _say(str(problem), problem.remedy, getattr(problem, "exit_code", ExitCode.ERROR))
    if hasattr(problem, "format_message"):  # typer's usage errors
        command = getattr(getattr(problem, "ctx", None), "command_path", "chronicle")
        return _say(problem.format_message(), f"see `{command} --help`", ExitCode.USAGE)
    if isinstance(problem, OSError):
        return _say(*_os_sentence(problem), ExitCode.ERROR)
    if isinstance(problem, MemoryError):
        return _say("out of memory", None, ExitCode.ERROR)
    missing = (problem.name or "").partition(".")[0] if isinstance(problem, ModuleNotFoundError) else ""
    if missing in EXTRAS:
        return _say(f"{missing} is not installed", f"pip install 'chronicle-ml[{EXTRAS[missing]}]'", ExitCode.ERROR)
    return _unexpected(problem)


def _os_sentence(problem: OSError) -> tuple[str, str | None]:
    where = f" `{problem.filename}`" if problem.filename else ""
    if problem.errno == errno.ENOSPC:
        return f"the disk is full:{where or ' what was to be written'} is not there", "free space, then repeat the command"
    what = problem.strerror or str(problem)
    return f"{what}:{where}" if where else what, None


def _unexpected(problem: BaseException) -> int:
    """An error that is a defect of this program: one sentence; the traceback with CHRONICLE_TRACEBACK=1."""
    if os.environ.get("CHRONICLE_TRACEBACK"):
        raise problem
    text = f"unexpected {type(problem).__name__}: {problem}"
    return _say(text, "this is a defect: run again with CHRONICLE_TRACEBACK=1 and report it", ExitCode.ERROR)


def _say(message: str, remedy: str | None, code: int) -> int:
    print(_shown(f"error: {message}"), file=sys.stderr)
    if remedy:
        print(_shown(f"hint: {remedy}"), file=sys.stderr)
    return int(code)


def _stores() -> Any:
    """The module that reads object stores, if this command has imported it."""
    return sys.modules.get("rollback.disk.remote")


def _shown(text: str) -> str:
    """`text` without control characters: messages quote file names and arguments."""
    from chronicle.story.plain import plain_block

    stores = _stores()
    return plain_block(text if stores is None else stores.shown(text))


if __name__ == "__main__":
    main()
