"""`chronicle runs` lists the runs of a directory; `chronicle compare` lays some of them side by side.

`--where` takes a comparison in Python's words: `lr > 1e-3 and status != "finished"`. It is read as a tree of comparisons and
never executed. Names are the columns of the list, settings (`settings.lr`, or `lr` where no column has that name) and logged
channels. A run for which a name is not known is not listed, and the count of such runs is said.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from chronicle.cli.options import IN_LOGS, CommandResult, InLogs, all_runs
from chronicle.errors import ChronicleError, UsageProblem
from chronicle.story.plain import align_columns, format_age, format_number
from rollback.channels import Role, canonical_of

if TYPE_CHECKING:
    from chronicle.report.comparison import ComparedArm

VALUES = (canonical_of(Role.LOSS), canonical_of(Role.LR))
COLUMNS = ("name", "begins", "status", "step", *VALUES, "launches", "incidents", "ended", "tags")
LEFT = {"name", "begins", "status", "tags"}
OPERATORS: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many, ast.NotIn: lambda one, many: one not in many,
}  # fmt: skip
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
EXAMPLE = 'lr > 1e-3 and status != "finished"'


def runs(
    names: list[str] | None = None,
    where: Annotated[
        str | None, Option(help=f"Only runs for which this holds, as `{EXAMPLE}`.", metavar="TEXT")
    ] = None,
    sort: str = "name",
    tag: list[str] | None = None,
    tree: bool = False,
    every: bool = False,
    add_tag: list[str] | None = None,
    remove_tag: list[str] | None = None,
    archive: str | None = None,
    restore: bool = False,
    at: InLogs = IN_LOGS,
) -> CommandResult:
    """List the runs of a directory with state, step and last values.

    Tags and the archive are notes in the journal of each run. Nothing is moved or deleted.

    Example: chronicle runs --where 'loss < 2.1 and "baseline" in tags' --sort loss

    Set aside what is superseded: chronicle runs tr-180 tr-181 --archive "wrong tokenizer"

    Options:
      [RUN…]: Only these runs; needed with --add-tag, --remove-tag, --archive, --restore.
      --sort: Order by this column or setting; `-NAME` for the highest first.
      --tag: Only runs with this tag (repeatable).
      --tree: Show forks below the run that they began from.
      --all: List also archived runs.
      --add-tag: Give the named runs this tag (repeatable).
      --remove-tag: Take this tag off them (repeatable).
      --archive REASON: Leave the named runs out of lists; no file is moved.
      --restore: Show archived runs in lists again.
    """
    from chronicle.runs import rows_of

    directory = all_runs(at.logs)
    marked = _mark(directory, names or (), add_tag or (), remove_tag or (), archive, restore)
    found = [row for row in rows_of(directory) if not names or row["name"] in names]
    hidden = 0 if every or names else sum(bool(row.get("archived")) for row in found)
    kept, unknown = _select([row for row in found if every or names or not row.get("archived")], where)
    kept = [row for row in kept if set(tag or ()) <= set(row["tags"])]
    name = sort.removeprefix("-")
    known = [row for row in kept if _lookup(row, name) is not None]
    if name != "name" and kept and not known:
        raise UsageProblem(
            f"--sort `{name}`: no run has it", f"columns are {', '.join(COLUMNS)}; also settings and channels"
        )
    known.sort(key=lambda row: _sortable(_lookup(row, name)), reverse=sort.startswith("-"))
    ordered = known + [row for row in kept if _lookup(row, name) is None]
    talk = list(marked)
    if hidden:
        talk.append(f"{hidden} archived {'run is' if hidden == 1 else 'runs are'} not listed: `--all` lists them")
    if tree:
        ordered = list(_as_tree(ordered))
    if unknown:
        nowhere = _known_nowhere(where or "", found)
        why = f"; no run at all has `{'`, `'.join(nowhere)}` (put texts in quotes)" if nowhere else ""
        talk.append(f"{unknown} of {len(found)} runs are not listed: `{where}` asks for something that they do not have{why}")
    if not found:
        talk.append(
            f"no run in `{directory}`: start one with `chronicle run -- …`, or name another directory with --logs DIR"
        )
    return CommandResult(lines=_table(ordered, name), data=ordered, talk=talk)


def _mark(
    logs: Path, names: Sequence[str], add: Sequence[str], remove: Sequence[str], archive: str | None, restore: bool
) -> tuple[str, ...]:
    """Write tags and the archive into the journals of the named runs; what was done, in words."""
    from chronicle.runs import mark_runs
    from chronicle.runs import open as open_run

    chosen = [open_run(name, logs=logs).paths for name in dict.fromkeys(names)]
    if not (add or remove or archive is not None or restore):
        return ()
    if not names:
        raise UsageProblem("no run is named: expected as `chronicle runs tr-180 --add-tag baseline`")
    if (restore and archive is not None) or set(add) & set(remove):
        raise UsageProblem("one command cannot archive and restore a run, or add and remove the same tag")
    archived = True if archive is not None else False if restore else None
    mark_runs(chosen, tags=add, untags=remove, archived=archived, why=archive or "")
    return (f"written into the journal of {', '.join(one.run for one in chosen)}",)


def _as_tree(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The rows with each fork below the run that it began from, by the ids that both carry; `branch` draws the tree.

    A run whose parent is not listed stands at the left, and `begins` says where it began.
    """
    known = {row["run_id"]: row for row in rows if row.get("run_id")}
    below: dict[str, list[Mapping[str, Any]]] = {}  # id of the parent, "" for none that is listed -> its forks
    for row in rows:
        parent = row.get("parent_id")
        is_below = parent in known and known[parent] is not row
        below.setdefault(str(parent) if is_below else "", []).append(row)
    seen: set[int] = set()

    def walk(row: Mapping[str, Any], lead: str, mark: str) -> Iterator[Mapping[str, Any]]:
        if id(row) in seen:
            return
        seen.add(id(row))
        begins = None
        if row.get("parent") is not None:
            begins = "step not known" if row.get("parent_step") is None else f"step {row['parent_step']}"
            begins += "" if mark else f" of {row['parent']} (not listed)"
        yield {**row, "branch": lead + mark, "begins": begins}
        inner = {"": lead, "└─ ": f"{lead}   ", "├─ ": f"{lead}│  "}[mark]
        children = below.get(str(row.get("run_id")), [])
        for child in children:
            yield from walk(child, inner, "└─ " if child is children[-1] else "├─ ")

    for row in (*below.get("", ()), *rows):  # the second time finds what only a circle of parents holds
        yield from walk(row, "", "")


# --- the table -----------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, Any]], sort: str) -> list[str]:
    if not rows:
        return []
    columns = [*COLUMNS, *((sort,) if sort not in COLUMNS else ())]
    cells = [[_cell(name, _lookup(row, name)) for name in columns] for row in rows]
    for row, line in zip(rows, cells, strict=True):
        line[0] = f"{row.get('branch', '')}{line[0]}{' (archived)' if row.get('archived') else ''}"
    whole = [column for column in zip(columns, *cells, strict=True) if column[0] in ("name", "status") or any(column[1:])]
    right = [at for at, column in enumerate(whole) if column[0] not in LEFT]
    return align_columns(list(zip(*whole, strict=True)), right)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "ended":
        try:
            seconds = datetime.now(UTC).timestamp() - datetime.fromisoformat(value).timestamp()
        except ValueError:
            return str(value)
        return f"{format_age(seconds)} ago"
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)[:30]
    if isinstance(value, float):
        return format_number(value) if math.isfinite(value) else str(value)
    return str(value)[:60]


# --- selecting -----------------------------------------------------------------------------------------------------------


def _select(rows: Sequence[Mapping[str, Any]], where: str | None) -> tuple[list[Mapping[str, Any]], int]:
    """The rows for which `where` holds, and how many it could not be asked of."""
    if where is None:
        return list(rows), 0
    try:
        tree = ast.parse(where.strip(), mode="eval").body
        _value(tree, {"settings": {}, "values": {}})
    except (SyntaxError, ValueError, RecursionError) as problem:
        why = problem.msg if isinstance(problem, SyntaxError) else problem
        raise UsageProblem(f"--where `{where}` is not understood ({why})", f"expected as `{EXAMPLE}`") from problem
    answers = [_value(tree, row) for row in rows]
    return [row for row, answer in zip(rows, answers, strict=True) if answer], answers.count(None)


def _known_nowhere(where: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of a condition that are no column, setting or channel of any run."""
    nodes = [node for node in ast.walk(ast.parse(where.strip())) if isinstance(node, ast.Name | ast.Attribute)]
    whole = dict.fromkeys(ast.unparse(node) for node in nodes)
    names = [name for name in whole if not any(other.startswith(f"{name}.") for other in whole)]
    return [name for name in names if name not in COLUMNS and all(_lookup(row, name) is None for row in rows)]


def _value(node: ast.AST, row: Mapping[str, Any]) -> Any:
    """What a condition, or a part of one, is for this run; None where that is not known. Raises ValueError for anything else.

    As in SQL, `or` needs one part that is true, `and` one that is false.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple():
            return [_value(part, row) for part in node.elts]
        case ast.Name() | ast.Attribute() if NAME.fullmatch(ast.unparse(node)):
            return _lookup(row, ast.unparse(node))
        case ast.UnaryOp(op=ast.USub()):
            value = _value(node.operand, row)
            return -value if isinstance(value, int | float) else None
        case ast.UnaryOp(op=ast.Not()):
            value = _value(node.operand, row)
            return None if value is None else not value
        case ast.BoolOp():
            answers = [None if value is None else bool(value) for value in (_value(part, row) for part in node.values)]
            deciding = isinstance(node.op, ast.Or)
            if deciding in answers:
                return deciding
            return None if None in answers else not deciding
        case ast.Compare() if all(type(how) in OPERATORS for how in node.ops):
            values = [_value(part, row) for part in (node.left, *node.comparators)]
            return _compared(node.ops, values)
    raise ValueError(f"`{ast.unparse(node)}` is no comparison")


def _compared(ops: Sequence[ast.cmpop], values: Sequence[Any]) -> bool | None:
    if any(value is None for value in values):
        return None
    try:
        return all(OPERATORS[type(how)](*pair) for how, pair in zip(ops, pairwise(values), strict=True))
    except TypeError:
        return None  # a text compared with a number


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    """A column, a setting or the newest value of a channel; None where it is not known."""
    from chronicle.story.launch_settings import as_value

    if row.get(name) is not None and name not in ("values", "settings"):
        return row[name]
    short = name.removeprefix("settings.")
    if short in row["settings"]:
        return as_value(row["settings"][short])
    return row["values"].get(name.removeprefix("values."), row["values"].get(name.replace(".", "/")))


def _sortable(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value))


# --- side by side --------------------------------------------------------------------------------------------------------


def show_comparison(
    names: list[str],
    channel: str = "loss",
    by: str = "step",
    margin: float | None = None,
    out: Path | None = None,
    at: InLogs = IN_LOGS,
) -> CommandResult:
    """Compare runs: values at equal steps, settings that differ.

    A run is compared along its lineage, a launch (RUN@LAUNCH) with all of its steps.

    Example: chronicle compare tr-190 tr-191 --out loss.png

    Did a rollback help? The abandoned steps beside the same steps of the new launch: chronicle compare tr-190@3 tr-190@4

    Two arms at several seeds, by the studies' statistics: chronicle compare low-1 low-2 … high-1 high-2 … --margin 0.02

    Options:
      RUN…: Runs: names, directories, or RUN@LAUNCH for one launch.
      --channel: The channel that is compared.
      --by AXIS: Align by `step`, or by the `time` of training.
      --margin VALUE: Of two arms with several seeds: what counts as equal; chosen before looking.
      --out FILE: Draw the curves into this file (.png, .svg or .pdf).
    """
    from chronicle.report.comparison import arms_of, compare_runs, draw_comparison, tell
    from chronicle.runs import open_launch

    if by not in ("step", "time"):
        raise UsageProblem(f"--by `{by}`: expected step or time")
    if out is not None and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageProblem(f"--out `{out}`: expected a name that ends with .png, .svg or .pdf")
    named = [open_launch(name, logs=at.named()) for name in names]
    labels = [run.name if launch is None else f"{run.name}@{launch}" for run, launch in named]
    comparison = compare_runs([(label, *one) for label, one in zip(labels, named, strict=True)], channel, by)
    talk = []
    if out is not None:
        draw_comparison(comparison, out)
        talk.append(f"picture: {out}")
    lines, data, arms = tell(comparison), comparison.to_json(), arms_of(comparison)
    if margin is not None:
        said, data["verdict"] = _verdict(arms, margin)
        lines += ["", said]
    elif len(arms) == 2:
        two = f"{arms[0].name} and {arms[1].name}"
        talk.append(f"two arms, {two}: `--margin VALUE` gives the studies' verdict over their seeds")
    elif len(comparison.members) > 1 and not arms:
        talk.append(
            "one run of each shows a difference, not its cause: `chronicle experiment` plans a comparison with several seeds"
        )
    return CommandResult(lines=lines, data=data, talk=talk)


def _verdict(arms: "Sequence[ComparedArm]", margin: float) -> tuple[str, Mapping[str, Any]]:
    """The studies' verdict on two arms at the seeds that both have."""
    from chronicle.cli.main import judge_runs

    if not (math.isfinite(margin) and margin > 0):
        raise UsageProblem(f"--margin {margin}: expected a number above 0")
    if len(arms) != 2:
        found = f"{len(arms)} arms" if arms else "no arms"
        raise UsageProblem(
            f"--margin: expected runs of two arms that differ in their seed and in what is compared, and found {found}",
            "record the seed: --seed N on the command line, or chronicle.config({'seed': N})",
        )
    first, second = arms
    differences = {seed: second.values[seed] - value for seed, value in first.values.items() if seed in second.values}
    judged = judge_runs((first.name, second.name), differences, margin)
    if judged is None:
        raise ChronicleError("the studies are not installed", "pip install 'chronicle-ml[study]'")
    said, numbers = judged
    runs = {arm.name: list(arm.runs) for arm in arms}
    return f"over seeds, at the last common place: {said}", {**numbers, "arms": runs, "seeds": sorted(differences)}
