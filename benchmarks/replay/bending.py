"""How a training is bent for one play: texts of its script are others, a line does something more, more files are laid."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.replay.causes import Training, edit

__all__ = ["after", "before", "laid", "pack", "package", "variant", "with_place"]

TAKEN = "from faults import at, flip, kind\n"


def variant(training: Training, *pairs: str) -> Training:
    """The same with texts of its script replaced."""

    def lay(directory: Path) -> None:
        training.lay(directory)
        edit("train.py", *pairs)(directory, {})

    return replace(training, lay=lay)


def after(training: Training, line: str, planted: str, does: str, step: str = "step") -> Training:
    """A training that does something after this line, in the step of a fault of this kind."""
    return variant(training, line, line + _branch(line, planted, does, step))


def before(training: Training, line: str, planted: str, does: str, step: str = "step") -> Training:
    """The same before it."""
    return variant(training, line, _branch(line, planted, does, step) + line)


def _branch(line: str, planted: str, does: str, step: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return f'{indent}if kind == "{planted}" and {step} == at:\n{indent}    {does}\n'


def with_place(training: Training) -> Training:
    """The same, whose script knows the place of a fault, too."""
    return variant(training, TAKEN, TAKEN.replace("kind", "kind, place"))


def laid(training: Training, more: Callable[[Path], None]) -> Training:
    """The same with something more laid."""

    def lay(directory: Path) -> None:
        training.lay(directory)
        more(directory)

    return replace(training, lay=lay)


def pack(directory: Path, file: str, into: str, name: str, version: str) -> None:
    """Make a package of a file."""
    package(directory / into, name, version, f'__version__ = "{version}"\n' + (directory / file).read_text())
    (directory / file).unlink()


def package(directory: Path, name: str, version: str, text: str) -> None:
    """A package as an installer leaves it."""
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text(text)
    held = directory / f"{name}-{version}.dist-info"
    held.mkdir()
    (held / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (held / "RECORD").write_text(f"{name}/__init__.py,,\n{held.name}/METADATA,,\n{held.name}/RECORD,,\n")
