"""A report as blocks, written once as Markdown with files beside it and once as a single page of HTML. Deterministic."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

__all__ = ["Block", "Figure", "Heading", "Paragraph", "Table", "format_csv", "format_html", "format_markdown"]

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;font-size:.85rem;margin:1rem 0;display:block;overflow-x:auto}
td,th{border:1px solid #c9d1d9;padding:.25rem .5rem;text-align:left}img{max-width:100%}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A title; level 1 is the report's."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """Plain sentences; `**` marks what is strong."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under a header; `name` is the CSV's, which holds all rows even where the page shows fewer."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    show: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture `<name>.png` with its numbers in `<name>.csv`."""

    name: str
    caption: str


Block: TypeAlias = Heading | Paragraph | Table | Figure


def format_markdown(blocks: Sequence[Block]) -> str:
    """The report for a repository; pictures and CSV lie beside it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Figure):
        return f"![{block.caption}]({block.name}.png)\n\n{block.caption} Numbers: [{block.name}.csv]({block.name}.csv)."
    if not block.rows:
        return "(none)"
    if block.show == 0:
        return f"All numbers: [{block.name}.csv]({block.name}.csv)."
    shown = block.rows[: block.show]
    lines = [block.header, tuple("---" for _ in block.header), *shown]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)
    more = f" ({len(block.rows) - len(shown)} more rows there)" if len(shown) < len(block.rows) else ""
    return f"{text}\n\nAll numbers: [{block.name}.csv]({block.name}.csv){more}."


def format_csv(table: Table) -> str:
    """All rows of a table."""
    return "\n".join(",".join(_quote(cell) for cell in row) for row in (table.header, *table.rows)) + "\n"


def _quote(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(sign in cell for sign in ',"\n') else cell


def format_html(blocks: Sequence[Block], directory: Path) -> str:
    """One self-contained page; pictures are read from `directory` and embedded."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    body = "\n".join(_html(block, directory) for block in blocks)
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style>\n{body}\n</html>\n")  # fmt: skip


def _html(block: Block, directory: Path) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Paragraph):
        parts = html.escape(block.text).split("**")
        text = "".join(part if number % 2 == 0 else f"<b>{part}</b>" for number, part in enumerate(parts))
        return "\n".join(f"<p>{one}</p>" for one in text.split("\n\n"))
    if isinstance(block, Figure):
        picture = base64.b64encode((directory / f"{block.name}.png").read_bytes()).decode()
        caption = html.escape(block.caption)
        return f'<figure><img alt="{caption}" src="data:image/png;base64,{picture}"><figcaption>{caption}</figcaption></figure>'
    if block.show == 0:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows[: block.show]
    )
    return f"<table><tr>{head}</tr>\n{rows}</table>"
