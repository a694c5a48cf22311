"""Print the figures of the house, and hold each room to its budget: exit 5 where a figure is above its row in `budgets.toml`.

Reads the four packages as syntax trees; runs nothing of them and needs only the standard library. `--list` names what
was counted, `--json` prints the figures as JSON, `--lower` writes the rows down to the present figures, never up. A row may
rise only with a reason: `reason = "…"` in it, asked for where the row is higher than in the commit before.

Tokens are those of `tokenize`: names, operators, numbers and strings; a docstring is one string, an f-string is one, a comment
none. Lines are all lines, empty ones too. So the four packages had 732,815 tokens in 96,297 lines on 28 November 2026, and 7.6
tokens a line. Code lines are those where such a token begins that is no docstring.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rollback", "chronicle", "bit_transformer", "experiments")
EVENTS = "chronicle/journal/events.py"
ENTRY = "chronicle_ml.py"  # the module of the console script
WHOLE = ("bit_transformer", "experiments")  # packages that are one room
BUDGETS = Path(__file__).with_name("budgets.toml")
HEAD = """# The most that each room may hold. `python scripts/house.py` says what a figure counts; `--lower` lowers these.
# Density is by package: conditional expressions, comprehensions and boolean operators are for 1,000 code lines.
# A row may rise only with `reason = "…"` in it.

"""
CALL_DEPTH = 6  # counted from the process: main -> run -> the command's function -> four calls more
CONVENTIONS = frozenset({"main", "app"})  # names that many files have by convention


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of the four packages."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether this is an `__init__.py`."""
        return self.path.name == "__init__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the report."""

    what: str
    value: float
    aim: str
    counted: tuple[str, ...] = ()


def main() -> int:
    """Print the figures, or lower the rows; 5 when one is above its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name what was counted under each figure")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--lower", action="store_true", help="write the rows of budgets.toml down to the present figures")
    arguments = parser.parse_args()
    rooms = room_figures(ROOT)
    if arguments.lower:
        write_budgets(rooms, read_budgets(BUDGETS.read_text(encoding="utf-8")))
        return 0
    figures = measure(read_modules(ROOT), ROOT)
    if arguments.json:
        print(json.dumps({figure.what: figure.value for figure in figures} | {"rooms": rooms}, indent=2))
        return 0
    for figure in figures:
        print(f"{figure.what:<58} {figure.value:>8g}   {figure.aim}".rstrip())
        for line in figure.counted if arguments.list else ():
            print(f"    {line}")
    above = find_above(rooms, read_budgets(BUDGETS.read_text(encoding="utf-8"))) + find_raised()
    for sentence in above:
        print(f"error: {sentence}", file=sys.stderr)
    return 5 if above else 0


# ---- budgets -----------------------------------------------------------------------------------------------------------


def room_figures(root: Path) -> dict[str, dict[str, float]]:
    """Lines and tokens of each room, and of all; how full the lines of each package are."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found = count(path.read_text(encoding="utf-8"))
            inside = path.relative_to(root).parts
            is_loose = len(inside) == 2
            room = package if package in WHOLE else f"{package}/*.py" if is_loose else "/".join(inside[:2])
            for name in (room, "all", f"density of {package}"):
                counts[name] += found
    figures: dict[str, dict[str, float]] = {}
    for name, found in counts.items():
        if not name.startswith("density of"):
            figures[name] = {"lines": found["lines"], "tokens": found["tokens"]}
            continue
        figures[name] = {"tokens_a_line": round(found["tokens"] / found["lines"], 1)}
        for what in ("conditionals", "comprehensions", "booleans"):
            figures[name][what] = round(1000 * found[what] / found["code"])
    return figures


def count(text: str) -> Counter[str]:
    """Lines, code lines, tokens and dense expressions of one file."""
    found = Counter(lines=text.count("\n"))
    tree = ast.parse(text)
    documented = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documented.add(node.lineno)
        found["conditionals"] += isinstance(node, ast.IfExp)
        found["comprehensions"] += isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp)
        found["booleans"] += isinstance(node, ast.BoolOp)
    lines, depth = set(), 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        is_inside = depth > 0  # from Python 3.12 on the parts of an f-string are tokens
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
        if not is_inside and kind in ("NAME", "OP", "NUMBER", "STRING", "FSTRING_START"):
            found["tokens"] += 1
            lines.add(token.start[0])
    found["code"] = len(lines - documented)
    return found


def read_budgets(text: str) -> dict[str, dict[str, Any]]:
    """The rows of the table: room -> figure -> most."""
    return tomllib.loads(text)


def write_budgets(rooms: Mapping[str, Mapping[str, float]], rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table with each row at most as high as it was; a room that is gone loses its row."""
    text = HEAD
    for room, figures in sorted(rooms.items()):
        row = dict(rows.get(room, {}))
        reason = row.pop("reason", "")
        words = [f"{name} = {min(value, row.get(name, value))}" for name, value in figures.items()]
        words += [f"reason = {json.dumps(reason, ensure_ascii=False)}"] if reason else []
        text += f'"{room}" = {{ {", ".join(words)} }}\n'
    BUDGETS.write_text(text, encoding="utf-8")


def find_above(rooms: Mapping[str, Mapping[str, float]], rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One sentence for each figure above its row, and for a room without one."""
    found = []
    for room, figures in rooms.items():
        if room not in rows:
            found.append(f"{room} has no row in scripts/budgets.toml")
            continue
        for name, value in figures.items():
            most = rows[room].get(name, 0)
            if value > most:
                found.append(f"{room}: {value} {name}, and its row in scripts/budgets.toml allows {most}")
    return found


def find_raised() -> list[str]:
    """One sentence for each row that is higher than in the last commits of the table, without a reason beside it."""
    found = []
    rows = read_budgets(BUDGETS.read_text(encoding="utf-8"))
    for commit in ("HEAD", "HEAD^"):
        command = ["git", "show", f"{commit}:scripts/budgets.toml"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        earlier = read_budgets(done.stdout) if done.returncode == 0 else {}
        for room, row in rows.items():
            before = earlier.get(room, row)
            if "reason" not in row and any(row[name] > before.get(name, row[name]) for name in row):
                found.append(f"{room}: its row is higher than in {commit} and says no reason")
    return found


# ---- figures -----------------------------------------------------------------------------------------------------------


def measure(modules: Mapping[str, Module], root: Path) -> tuple[Figure, ...]:
    """All figures, in the order of the report."""
    num_lines = sum(module.text.count("\n") for module in modules.values())
    imports = {name: imported_modules(module, modules) for name, module in modules.items()}
    entry = root / ENTRY
    if entry.exists():  # no room of the house, but it imports one
        text = entry.read_text(encoding="utf-8")
        console = Module(name="chronicle_ml", path=entry, text=text, tree=ast.parse(text))
        imports[console.name] = imported_modules(console, modules)
    single = single_importers(modules, imports)
    shared = shared_names(modules)
    literals = kind_literals(modules, root)
    undocumented = undocumented_functions(modules)
    cycles = import_cycles(imports)
    path = call_path(modules, root)
    readme = root / "README.md"
    readme_lines = readme.read_text(encoding="utf-8").count("\n") if readme.exists() else 0
    return (
        Figure(what="lines of the four packages", value=num_lines, aim=""),
        Figure(what="files", value=len(modules), aim=""),
        Figure(what="files per 1,000 lines", value=round(1000 * len(modules) / max(num_lines, 1), 2), aim="< 5"),
        Figure(what="modules with exactly one importer", value=len(single), aim="< 40", counted=single),
        Figure(what="public names defined in more than one file", value=len(shared), aim="< 10", counted=shared),
        Figure(what="entry-kind literals outside events.py", value=len(literals), aim="0", counted=literals),
        Figure(what="public functions without a docstring", value=len(undocumented), aim="0", counted=undocumented),
        Figure(what=f"files on the `rollback` path to call depth {CALL_DEPTH}", value=len(path), aim="<= 35",
               counted=path),
        Figure(what="import cycles", value=len(cycles), aim="0", counted=cycles),
        Figure(what="README lines", value=readme_lines, aim="80 to 120"),
    )  # fmt: skip


def read_modules(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, Module]:
    """Every Python file of the packages by dotted name."""
    found: dict[str, Module] = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            text = path.read_text(encoding="utf-8")
            found[".".join(parts)] = Module(name=".".join(parts), path=path, text=text, tree=ast.parse(text))
    return found


def imported_modules(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Modules of the four packages that this one imports, anywhere in the file but under `if TYPE_CHECKING:`."""
    found: set[str] = set()
    waiting: list[ast.AST] = [module.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting.extend(node.orelse)
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(node, module)
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
        else:
            continue
        found.update(name for name in names if name in modules and name != module.name)
    return found


def absolute_base(node: ast.ImportFrom, module: Module) -> str:
    """The absolute name behind `from X import`."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def single_importers(modules: Mapping[str, Module], imports: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Modules, packages excepted, that exactly one other module of the four packages imports (tests do not count)."""
    importers: dict[str, list[str]] = defaultdict(list)
    for name, targets in imports.items():
        for target in targets:
            importers[target].append(name)
    return tuple(
        f"{name} <- {importers[name][0]}"
        for name, module in sorted(modules.items())
        if not module.is_package and len(importers[name]) == 1
    )


def shared_names(modules: Mapping[str, Module]) -> tuple[str, ...]:
    """Public classes, functions and type aliases that are defined at the top level of more than one file."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, module in modules.items():
        for defined in top_level_names(module.tree):
            if not defined.startswith("_") and defined not in CONVENTIONS:
                places[defined].add(name)
    return tuple(f"{name}: {', '.join(sorted(where))}" for name, where in sorted(places.items()) if len(where) > 1)


def module_docstring(module: Module) -> str:
    """The docstring of a file; empty where there is none."""
    return ast.get_docstring(module.tree) or ""


def top_level_names(tree: ast.Module) -> Iterator[str]:
    """Names of classes, functions and aliases in CamelCase; constants are not counted."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id[:1].isupper() and not target.id.isupper() and len(target.id) > 1:
                    yield target.id


def kind_literals(modules: Mapping[str, Module], root: Path) -> tuple[str, ...]:
    """Strings that are kinds of journal entries, outside events.py.

    A kind with a dot counts wherever it stands as a whole string. A kind that is also a common word counts where it is
    compared with something named `kind` or stands first in a call of `append`.
    """
    kinds = entry_kinds(root)
    found: list[str] = []
    for module in modules.values():
        where = module.path.relative_to(root).as_posix()
        if where == EVENTS:
            continue
        found += [f"{where}:{line} {text!r}" for line, text in sorted(set(literals_of(module.tree, kinds)))]
    return tuple(found)


def literals_of(tree: ast.Module, kinds: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each literal of a kind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value and node.value in kinds:
            yield node.lineno, node.value
        elif isinstance(node, ast.Compare) and any(is_kind(side) for side in (node.left, *node.comparators)):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in kinds:
                    yield part.lineno, part.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            first = node.args[0] if node.args else None
            if len(node.args) + len(node.keywords) > 1 and isinstance(first, ast.Constant) and first.value in kinds:
                yield first.lineno, str(first.value)


def is_kind(node: ast.expr) -> bool:
    """Whether an expression is named `kind`."""
    return (isinstance(node, ast.Attribute) and node.attr == "kind") or (isinstance(node, ast.Name) and node.id == "kind")


def entry_kinds(root: Path) -> frozenset[str]:
    """The kinds that events.py lists in its enum."""
    found: set[str] = set()
    for node in ast.parse((root / EVENTS).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
            values = [item.value for item in node.body if isinstance(item, ast.Assign)]
            found |= {one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return frozenset(found)


def undocumented_functions(modules: Mapping[str, Module]) -> tuple[str, ...]:
    """Public functions, and public methods of public classes, without a docstring; overloads and stubs excepted."""
    found: list[str] = []
    for name, module in modules.items():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found += [f"{name}.{node.name}.{item.name}" for item in node.body if lacks_docstring(item)]
            elif lacks_docstring(node):
                found.append(f"{name}.{node.name}")
    return tuple(sorted(found))


def lacks_docstring(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Whether this is a public function that says nothing about itself."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
        return False
    return ast.get_docstring(node) is None and not any("overload" in ast.unparse(mark) for mark in node.decorator_list)


def import_cycles(imports: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Groups of modules that import each other, at any level of the file (strongly connected components)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in imports:
        walk_after(start, imports, seen, order)
    backwards: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports.items():
        for target in targets:
            backwards[target].add(name)
    groups: list[str] = []
    placed: set[str] = set()
    for start in reversed(order):
        group: list[str] = []
        walk_after(start, backwards, placed, group)
        if len(group) > 1:
            groups.append(" <-> ".join(sorted(group)))
    return tuple(groups)


def walk_after(start: str, edges: Mapping[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Depth-first walk that adds each name to `order` after what it leads to."""
    waiting = [(start, False)]
    while waiting:
        name, done = waiting.pop()
        if done:
            order.append(name)
        elif name not in seen:
            seen.add(name)
            waiting.append((name, True))
            waiting += [(target, False) for target in edges.get(name, ()) if target not in seen]


def call_path(modules: Mapping[str, Module], root: Path) -> tuple[str, ...]:
    """Files whose functions the command `rollback` reaches in at most six calls from the start of the process.

    A static call graph: names and imported names are followed exactly, classes to their `__init__` and `__post_init__`,
    and a method by its name where one class of a package that the caller may import defines it and no built-in type
    does. Calls that typer, the standard library or a table of functions makes are not seen.
    """
    graph = CallGraph(modules)
    start = graph.find_command("rollback")
    if start is None:
        return ()
    reached = {start}
    edge = {start}
    for _ in range(CALL_DEPTH - 2):
        edge = {target for function in edge for target in graph.calls(function)} - reached
        reached |= edge
    return tuple(sorted({modules[name].path.relative_to(root).as_posix() for name, _ in reached}))


class CallGraph:
    """Which function of the four packages calls which, as far as names tell."""

    # method names of built-in types: `x.read()` says nothing about a class of ours
    BUILT_IN = frozenset(name for kind in (str, bytes, dict, list, set, Path, io.BytesIO, re.Match) for name in dir(kind))

    def __init__(self, modules: Mapping[str, Module]) -> None:
        """Index functions, methods and imported names."""
        self.modules = modules
        self.functions: dict[tuple[str, str], ast.AST] = {}
        self.methods: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.names: dict[str, dict[str, tuple[str, str]]] = {}
        for name, module in modules.items():
            self.names[name] = dict(self.imported_names(module))
            for node in module.tree.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.functions[name, node.name] = node
                elif isinstance(node, ast.ClassDef):
                    self.functions[name, node.name] = ast.Module(body=[], type_ignores=[])
                    for item in node.body:
                        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                            key = (name, f"{node.name}.{item.name}")
                            self.functions[key] = item
                            self.methods[item.name].append(key)

    def find_command(self, verb: str) -> tuple[str, str] | None:
        """The function of a verb in the package of commands."""
        found = ((module, name) for module, name in self.functions if module.startswith("chronicle.cli.") and name == verb)
        return next(found, None)

    def imported_names(self, module: Module) -> Iterator[tuple[str, tuple[str, str]]]:
        """Local name -> (module, name there); the name is empty where a module was imported."""
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                base = absolute_base(node, module)
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    if whole in self.modules:
                        yield alias.asname or alias.name, (whole, "")
                    elif base in self.modules:
                        yield alias.asname or alias.name, (base, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules and alias.asname:
                        yield alias.asname, (alias.name, "")

    def calls(self, function: tuple[str, str]) -> set[tuple[str, str]]:
        """What a function calls; a class leads to what runs when it is made."""
        module, name = function
        found = {key for key in ((module, f"{name}.__init__"), (module, f"{name}.__post_init__")) if key in self.functions}
        for node in ast.walk(self.functions[function]):
            if isinstance(node, ast.Call):
                found |= self.targets(node.func, module, name.partition(".")[0])
        return found

    def targets(self, called: ast.expr, module: str, owner: str) -> set[tuple[str, str]]:
        """The functions that an expression in front of `(` may be."""
        if isinstance(called, ast.Name):
            key = (module, called.id) if (module, called.id) in self.functions else self.names[module].get(called.id)
            return self.resolve(key)
        if not isinstance(called, ast.Attribute):
            return set()
        if isinstance(called.value, ast.Name):
            if called.value.id == "self" and (module, f"{owner}.{called.attr}") in self.functions:
                return {(module, f"{owner}.{called.attr}")}
            source = self.names[module].get(called.value.id)
            if source is not None and not source[1]:
                return self.resolve((source[0], called.attr))
        below = PACKAGES[: PACKAGES.index(module.partition(".")[0]) + 1]
        keys = [key for key in self.methods.get(called.attr, ()) if key[0].partition(".")[0] in below]
        return set(keys) if len(keys) == 1 and called.attr not in self.BUILT_IN else set()

    def resolve(self, key: tuple[str, str] | None) -> set[tuple[str, str]]:
        """Follow re-exports of packages to the definition."""
        for _ in range(4):
            if key is None or key in self.functions:
                break
            key = self.names.get(key[0], {}).get(key[1])
        return {key} if key in self.functions and key is not None else set()


if __name__ == "__main__":
    sys.exit(main())
