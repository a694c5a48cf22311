"""Text of people and file names made safe for Markdown and HTML: shown as it was typed, never obeyed.

Code spans in backticks stay code (that is how people name files); everything else loses its power as markup.
"""

import html
import re
from urllib.parse import quote

from chronicle.story.plain import plain

__all__ = ["anchor_of", "html_text", "link_target", "markdown_cell", "markdown_line", "markdown_text"]

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


def markdown_cell(text: object) -> str:
    """One cell of a table: pipes escaped, code or not."""
    return markdown_line(text).replace("|", "\\|")


def markdown_text(text: object) -> str:
    """Several lines: line breaks stay; list marks at the beginning of a line stay, headings do not."""
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
    """Stable while the journal lives: it names the entry, not its place."""
    return "e-" + "".join(c for c in entry_id.lower() if c.isalnum())


def html_text(text: object) -> str:
    """Text for an HTML page, attribute values included."""
    return html.escape(plain(text), quote=True)


def link_target(path: str) -> str | None:
    """A relative path or http(s) address as a link target; None for anything else (`javascript:`, absolute paths, `..`)."""
    if WEB_LINK.fullmatch(path):
        return path
    parts = path.split("/")
    if not path or path.startswith(("/", "\\", "~")) or ".." in parts or ":" in parts[0] or plain(path) != path:
        return None
    return quote(path, safe="/.-_~+@,=")
