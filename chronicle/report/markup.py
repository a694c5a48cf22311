"""Escapes text from people and file names for Markdown and HTML, and holds the building blocks of the HTML page.

Code spans in backticks stay code; all other markup is escaped.
"""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chronicle.story.plain import plain
from rollback.disk.durable import write_atomic

CODE_SPAN = re.compile(r"`[^`\n]+`")
POWERFUL = re.compile(r"([\\*\[\]~])")
WEB_LINK = re.compile(r"https?://[^\s<>\"'`\\()]+")


def markdown_line(text: object) -> str:
    """One line of running text."""
    line = plain(text)
    out: list[str] = []
    end = 0
    for match in CODE_SPAN.finditer(line):
        out += [_prose(line[end : match.start()]), match.group()]
        end = match.end()
    out.append(_prose(line[end:]))
    return re.sub(r"^(\s*)([#>+-]|\d+[.)])(?=\s|$|#)", r"\1\\\2", "".join(out))


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = ()) -> str:
    """A table. Cells are escaped, except those of type `Raw`."""
    rule = "|".join("--:" if index in numeric else "---" for index in range(len(heads)))
    lines = [f"| {' | '.join(heads)} |", f"|{rule}|"]
    for row in rows:
        lines.append(f"| {' | '.join(map(_markdown_cell, row))} |")
    return "\n".join(lines)


def _markdown_cell(cell: object) -> str:
    """Pipes escaped, in code or not."""
    if isinstance(cell, Raw):
        return cell.markup
    return "" if cell is None else markdown_line(cell).replace("|", "\\|")


def markdown_text(text: object) -> str:
    """Several lines. Line breaks and list marks at the beginning of a line stay, headings are escaped."""
    lines = str(text).replace("\r\n", "\n").split("\n")
    return "\n".join(_body_line(line) for line in lines).strip("\n")


def _body_line(line: str) -> str:
    stripped = line.lstrip(" \t")
    mark = re.match(r"([-*+]|\d+[.)]) +", stripped)
    if mark is None:
        return markdown_line(stripped)
    return " " * min(len(line) - len(stripped), 3) + mark.group().replace("*", "-") + markdown_line(stripped[mark.end() :])


def _prose(text: str) -> str:
    escaped = POWERFUL.sub(r"\\\1", html.escape(text, quote=False))
    return escaped.replace("`", "\\`").replace("_ ", "\\_ ").replace(" _", " \\_")


def anchor_of(entry_id: str) -> str:
    """The anchor of an entry. It depends on the entry's id only, so links to it stay valid."""
    return "e-" + "".join(c for c in entry_id.lower() if c.isalnum())


def html_text(text: object) -> str:
    """Text for an HTML page, attribute values included."""
    return html.escape(plain(text), quote=True)


def link_target(path: str) -> str | None:
    """A relative path or http(s) address as a link target; None for everything else (`javascript:`, absolute paths, `..`)."""
    if WEB_LINK.fullmatch(path):
        return path
    parts = path.split("/")
    if not path or path.startswith(("/", "\\", "~")) or ".." in parts or ":" in parts[0] or plain(path) != path:
        return None
    return quote(path, safe="/.-_~+@,=")


def evidence_target(row: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Where a piece of evidence lies, as a link; and whether it is in the run's object store."""
    digest = row.get("sha256")
    if isinstance(digest, str) and len(digest) == 64 and digest.isalnum():
        return f"objects/{digest[:2]}/{digest}", True
    return link_target(str(row.get("path") or "")), False


# --- building blocks of the HTML page -----------------------------------------------------------------------------------


class Raw:
    """A cell of a table that is already markup."""

    def __init__(self, markup: str) -> None:
        self.markup = markup


def section(anchor: str, title: str, *parts: str) -> str:
    """A part of the page with a heading and an anchor."""
    return f'<section id="{anchor}"><h2>{html_text(title)}</h2>' + "".join(parts) + "</section>"


def plot(anchor: str, label: str) -> str:
    """The place of a plot. The page's script draws it when it comes into view."""
    return f'<div class="plot" id="{anchor}" role="img" aria-label="{html_text(label)}"></div>'


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = ()) -> str:
    """A table. Cells are escaped, except those of type `Raw`."""

    def cell(tag: str, index: int, value: object, scope: str = "") -> str:
        kind = ' class="n"' if index in numeric else ""
        inner = value.markup if isinstance(value, Raw) else html_text("" if value is None else value)
        return f"<{tag}{scope}{kind}>{inner}</{tag}>"

    head = "".join(cell("th", i, h, ' scope="col"') for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(content: str, title: str = "as a table") -> str:
    """A closed part of the page. Browsers lay it out when it is opened; a search on the page opens it."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"


# --- Making and writing a page


def own_file(name: str) -> str:
    """A file of this package: a template, a script or a style sheet."""
    return files("chronicle.report").joinpath(name).read_text(encoding="utf-8")


def fill(template: str, parts: Mapping[str, str]) -> str:
    """A template with each `@@NAME@@` replaced in one pass, so that filled-in text is not searched for placeholders."""
    pieces = own_file(template).split("@@")
    return "".join(piece if index % 2 == 0 else parts[piece] for index, piece in enumerate(pieces))


def write_page(path: Path, text: str) -> None:
    """Replace the file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text, durable=False)
