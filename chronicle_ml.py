"""The way into the distribution `chronicle-ml`: its console script, and the check that the right packages are imported.

Python takes the first package of a name that it finds: a `rollback.py` or an `experiments/` beside a user's script, or
the unrelated `chronicle` of the public index, may come before ours. This module lies beside our packages under a name that
nobody else uses, so it can tell. Imports nothing but the standard library.
"""

import gc
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType

__all__ = ["ShadowedPackage", "main", "require_own"]

HERE = os.path.dirname(os.path.abspath(__file__))


class ShadowedPackage(ImportError):
    """Python would import another package or file in place of one of ours."""

    def __init__(self, name: str, found: str, expected: str, remedy: str) -> None:
        """Name both places and the way out."""
        super().__init__(f"another `{name}` would be imported: `{found}`, expected `{expected}`", name=name, path=found)
        self.remedy = remedy


def require_own(*names: str) -> None:
    """Raise ShadowedPackage unless each top-level name would be imported from beside this file; imports none of them.

    Left uncaught, the error ends the program with one sentence, its hint, and exit code 1.
    """
    for name in names:
        found = _place_of(name)
        expected = os.path.join(HERE, name)
        if found is None or found == expected or os.path.realpath(found) == os.path.realpath(expected):
            continue
        sys.excepthook = _one_sentence(sys.excepthook)
        raise ShadowedPackage(name, found, expected, _remedy(name, found))


def _place_of(name: str) -> str | None:
    """The directory of the package, or the file of the module, that `import name` takes; None where there is none."""
    loaded = sys.modules.get(name)
    origin = getattr(loaded, "__file__", None)
    if origin is None:
        spec = None if loaded is not None else find_spec(name)
        if spec is None:
            return None
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    if origin is None:
        return None
    path = os.path.abspath(origin)
    return os.path.dirname(path) if os.path.basename(path).startswith("__init__.") else path


def _remedy(name: str, found: str) -> str:
    if name == "chronicle" and os.sep + "site-packages" + os.sep in found:
        return "pip uninstall chronicle; pip install --force-reinstall --no-deps chronicle-ml"
    return f"rename or move `{found}`, or start Python from another directory"


def _one_sentence(
    fallback: Callable[[type[BaseException], BaseException, TracebackType | None], object],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """An excepthook that prints a ShadowedPackage without traceback and leaves everything else to the one before."""

    def hook(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        if isinstance(problem, ShadowedPackage):
            _say(problem)
        else:
            fallback(kind, problem, trace)

    return hook


def _say(problem: ShadowedPackage) -> None:
    print(f"error: {problem}\nhint: {problem.remedy}", file=sys.stderr)


def main() -> None:
    """The command `chronicle`; always ends the process with a documented code."""
    try:
        require_own("chronicle")
        _require_whole()
    except ShadowedPackage as problem:
        _say(problem)
        sys.exit(1)
    gc.disable()  # importing makes many objects and hardly any garbage; the command line turns it on again
    from chronicle.cli.main import main as command

    command()


def _require_whole() -> None:
    """Raise ShadowedPackage when another distribution's files lie over ours in the same directory."""
    import chronicle

    if getattr(chronicle, "DISTRIBUTION", None) != "chronicle-ml":
        place = os.path.join(HERE, "chronicle")
        remedy = _remedy("chronicle", os.path.join(place, "__init__.py"))
        raise ShadowedPackage("chronicle", os.path.join(place, "__init__.py"), "that of chronicle-ml", remedy)


if __name__ == "__main__":
    main()
