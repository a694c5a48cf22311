"""An existing `chronicles.md`: each `## heading (date)` becomes an entry with its whole text, images as evidence.

Only what is written is taken: the date of the heading, images, and a rollback target where exactly one is named
("rolled back to 16250"). Which launch, which onset, which cause: unknown, and left so.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from chronicle.integrations.foreign_journals import Draft, Import, parse_moment

__all__ = ["read_chronicle"]

HEADING = re.compile(r"##\s+(.+?)\s*#*")
DATE = re.compile(r"\((\d{4}-\d{2}-\d{2})\)\s*$")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
ROLLBACK = re.compile(r"\broll(?:ed|ing)?[ -]?back\s+to\s+(?:step\s+|iteration\s+)?(\d{2,})", re.IGNORECASE)


def read_chronicle(path: Path) -> Import:
    """One draft a section; what stands before the first heading is the first entry."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return Import(format="chronicle", drafts=tuple(_drafts(lines)))


def _drafts(lines: list[str]) -> Iterator[Draft]:
    title, body, fenced = "", [], False
    for line in lines:
        fenced ^= line.lstrip().startswith("```")
        found = None if fenced else HEADING.fullmatch(line)
        if found is None or line.startswith("###"):
            body.append(line)
            continue
        yield from _section(title, body)
        title, body = found[1], []
    yield from _section(title, body)


def _section(heading: str, body: list[str]) -> Iterator[Draft]:
    text = "\n".join(body).strip("\n")
    if not heading and not text.strip():
        return
    dated = DATE.search(heading)
    title = heading[: dated.start()].strip() if dated else heading
    data: dict[str, object] = {"import": {"heading": heading}}
    if text:
        data["text"] = text
    images = [{"kind": "plot", "path": path, "what": what} for what, path in IMAGE.findall(text)]
    if images:
        data["evidence"] = images
    targets = {int(step) for step in ROLLBACK.findall(text)}
    if len(targets) == 1:
        data["action"] = {"verb": "rollback", "to": targets.pop()}
    first = next((line.strip("# ").strip() for line in body if line.strip()), "")
    yield Draft(kind="note", title=title or first, moment=parse_moment(dated[1]) if dated else None, data=data)
