"""The few pieces of markup that the HTML page is made of: sections, plots to be drawn, tables, folded parts. Pure."""

from collections.abc import Iterable, Sequence

from chronicle.report.markup import html_text

__all__ = ["Raw", "folded", "plot", "section", "table"]


class Raw:
    """A cell that is markup already."""

    def __init__(self, markup: str) -> None:
        self.markup = markup


def section(anchor: str, title: str, *parts: str) -> str:
    """A headed part of the page that a link can name."""
    return f'<section id="{anchor}"><h2>{html_text(title)}</h2>' + "".join(parts) + "</section>"


def plot(anchor: str, label: str) -> str:
    """The place of a plot; the page's script draws it when it comes into view."""
    return f'<div class="plot" id="{anchor}" role="img" aria-label="{html_text(label)}"></div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: Sequence[int] = ()) -> str:
    """Cells are escaped here; a cell that is already markup is a `Raw`."""

    def cell(tag: str, index: int, value: object) -> str:
        kind = ' class="n"' if index in numeric else ""
        inner = value.markup if isinstance(value, Raw) else html_text("" if value is None else value)
        return f"<{tag}{kind}>{inner}</{tag}>"

    head = "".join(cell("th", i, h) for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def folded(content: str, title: str = "as a table") -> str:
    """Closed until somebody opens it: no browser lays it out before, and a search on the page opens it."""
    return f"<details><summary>{html_text(title)}</summary>{content}</details>"
