"""The files that Hydra composes for a command: the primary config, its `defaults` list, the groups that the command chooses.

    python train.py optimizer=sgd +experiment=small
    conf/config.yaml              the primary config, named by `--config-path`, `--config-name` or `@hydra.main` in the script
    conf/optimizer/sgd.yaml       its fields stand below `optimizer`, or below `# @package …`
    conf/experiment/small.yaml

Only names are followed: nothing is found by looking around in a folder. Which of two files counts for one field is not said
here; that both hold it is. Source: hydra/_internal/defaults_list.py and hydra/core/default_element.py (1.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollback.files.json_file import Keys

_FOLDERS = ("--config-dir", "--config-path", "-cd", "-cp")  # hydra/_internal/utils.py `get_args_parser`
_NAMES = ("--config-name", "-cn")
_MAIN = re.compile(r"@hydra\.main\((?P<given>[^)]*)\)")
_GIVEN = re.compile(r"""(?P<name>config_path|config_name)\s*=\s*["'](?P<value>[^"']+)["']""")
_PACKAGE = re.compile(r"^#\s*@package\s+(?P<package>\S+)", re.MULTILINE)
_DEFAULTS = re.compile(r"^defaults:[ \t]*(?:#.*)?\n(?P<items>(?:[ \t]*(?:-.*|#.*)?\n)*)", re.MULTILINE)
_ITEM = re.compile(
    r"^\s*-\s+(?:(?:optional|override)\s+)*[\"']?(?P<group>/?[\w@./\-]+)[\"']?\s*(?::\s*(?P<choice>[^#\n]*?))?\s*(?:#.*)?$"
)
_CHOICE = re.compile(r"[\w./\-]+")
_OVERRIDE = re.compile(r"\+{0,2}(?P<group>[\w/]+)(?:@(?P<package>[\w.]*))?=(?P<choice>\[[\w./,\-]+\]|[\w./\-]+)")
_MOST_FILES = 64
_LARGEST = 1 << 20


def composed_files(words: Sequence[str], cwd: Path, scripts: Sequence[Path]) -> Iterator[tuple[Path, Keys]]:
    """(file, key path below which its fields stand) of each config that the command is composed from, the primary one first."""
    folders, names = [cwd / folder for folder in _values(words, _FOLDERS)], _values(words, _NAMES)
    for script in scripts:
        main = _MAIN.search(_text(script))
        given = {found["name"]: found["value"] for found in _GIVEN.finditer(main["given"])} if main else {}
        if "config_path" in given:
            folders.append(script.parent / given["config_path"])
        if main and not names and "config_name" in given:
            names = [given["config_name"]]
    chosen = {found["group"]: found["choice"] for word in words if (found := _OVERRIDE.fullmatch(word))}
    for folder in folders:
        for name in names:
            yield from _composed(folder, name.removesuffix(".yaml"), chosen)


def _composed(folder: Path, primary: str, chosen: dict[str, str]) -> Iterator[tuple[Path, Keys]]:
    seen: set[Path] = set()
    todo: list[tuple[str, str, str | None]] = [("", primary, None)]  # group, name in it, package
    todo += [(group, choice, None) for group, choice in chosen.items()]
    while todo and len(seen) < _MOST_FILES:
        group, choice, package = todo.pop(0)
        for name in _CHOICE.findall(choice):
            path = folder / group / f"{name.removesuffix('.yaml')}.yaml"
            text = "" if path in seen else _text(path)
            if not text:
                continue
            seen.add(path)
            yield path, _keys(text, package if package is not None else group)
            todo += [item for item in _defaults(text, group) if item[0] not in chosen or not item[0]]


def _defaults(text: str, group: str) -> Iterator[tuple[str, str, str | None]]:
    """(group, choice, package or None) of each item of a `defaults` list; a name alone is of the same group."""
    found = _DEFAULTS.search(text + "\n")
    for line in found["items"].splitlines() if found else ():
        item = _ITEM.match(line)
        if item is None or item["group"] == "_self_":
            continue
        name, _, package = item["group"].partition("@")
        if item["choice"] is None:
            at, _, choice = name.rpartition("/")
            yield _inside(group, at, name), choice, package or None
        else:
            yield _inside(group, name, name), item["choice"], package or None


def _inside(group: str, name: str, written: str) -> str:
    """A group of a defaults list is below the group of its file, unless it begins with `/`."""
    return name.lstrip("/") if written.startswith("/") or not group else f"{group}/{name}".rstrip("/")


def _keys(text: str, package: str) -> Keys:
    said = _PACKAGE.search(text)
    package = said["package"] if said else package
    return tuple(part for part in re.split(r"[./]", package) if part and not part.startswith("_global_"))


def _values(words: Sequence[str], options: Sequence[str]) -> list[str]:
    pairs = zip(words, [*words[1:], ""], strict=True)
    split = ((word.partition("="), following) for word, following in pairs)
    return [value if equals else following for (name, equals, value), following in split if name in options]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LARGEST else ""
    except (OSError, ValueError):
        return ""
